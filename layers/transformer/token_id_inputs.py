"""`TokenIdInputs`: base class of layers that take token ids, or the dict of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tfwd.layers.transformer.input_checks import no_ids_text


class TokenIdInputs:
    """Base class of layers whose input is token ids, alone or in a tokenizer's dict.

    Attributes:
        argument_of_key: dict from a key of the tokenizer's dict to an argument of `call`. "" is the
            first argument.
        renamed_arguments: dict from an argument's former name to its name, for saved models.
        positional: Number of arguments that can be positional.
    """

    name: str
    argument_of_key: ClassVar[dict[str, str]] = {}
    renamed_arguments: ClassVar[dict[str, str]] = {}
    positional = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        where = f"{type(self).__name__} '{self.name}'"
        if len(args) > self.positional:
            others = ", ".join(
                f"{name}=..." for name in dict.fromkeys(self.argument_of_key.values()) if name
            )
            raise TypeError(
                f"{where}: got {len(args)} positional arguments: pass the arguments after the ids "
                f"by name, as {others}"
            )
        args = self._named_by_a_tokenizer(args, kwargs)
        for name, value in (*(("ids", value) for value in args), *kwargs.items()):
            for key, part in value.items() if isinstance(value, Mapping) else [(name, value)]:
                if isinstance(part, (list, tuple)):
                    raise TypeError(
                        f"{where}: {key} is a {type(part).__name__}: pass a tensor or an array"
                    )
                dtype = getattr(part, "dtype", None)
                dtype = getattr(dtype, "name", dtype)
                if dtype in ("float16", "bfloat16") and "mask" not in key:  # Keras would cast them
                    raise TypeError(no_ids_text(where, key, dtype))
        if args and isinstance(args[0], Mapping):  # Hugging Face's BatchEncoding is not a dict
            args = (dict(args[0]), *args[1:])
        for before, now in self.renamed_arguments.items():
            if before in kwargs:
                kwargs[now] = kwargs.pop(before)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _named_by_a_tokenizer(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Gives arguments with a tokenizer's names their names in `call`: `bert(**tokens)`.

        Returns:
            The positional arguments. `kwargs` is changed in place.
        """
        for key, name in self.argument_of_key.items():
            if key == name or key not in kwargs:
                continue
            if name and name not in kwargs:
                kwargs[name] = kwargs.pop(key)
            elif not name and not args:
                args = (kwargs.pop(key),)
        return args

    def unpacked(self: Any, inputs: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the token ids, and the other arguments with the values of the dict filled in.

        Raises:
            ValueError: If the dict has no token ids, an unknown key, or an argument that is also
                given by name.
        """
        if not isinstance(inputs, Mapping):
            return inputs, given
        where, ids = f"{type(self).__name__} '{self.name}'", None
        for key, value in inputs.items():
            if key not in self.argument_of_key:
                raise ValueError(
                    f"{where}: the inputs have the unknown key {key!r}: remove it. "
                    f"The layer accepts {', '.join(self.argument_of_key)}"
                )
            name = self.argument_of_key[key]
            if not name and ids is None:
                ids = value
            elif name and given.get(name) is None:
                given[name] = value
            else:
                raise ValueError(
                    f"{where}: {name or key} is given twice, once as {key!r}: pass it once"
                )
        if ids is None:
            raise ValueError(
                f"{where}: the inputs need 'input_ids', but have {', '.join(map(repr, inputs))}"
            )
        return ids, given

    def argument_value(self: Any, inputs: Any, name: str = "") -> Any:
        """Returns the ids or another argument from a dict.

        Inputs that are no dict are the ids, and contain no other argument.
        """
        if not isinstance(inputs, Mapping):
            return None if name else inputs
        return next((v for key, v in inputs.items() if self.argument_of_key.get(key) == name), None)


# This attribute tells AutoGraph not to convert the method.
TokenIdInputs.__call__.autograph_info__ = {}  # type: ignore[attr-defined]

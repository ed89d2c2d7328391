"""Orders that the axes of a tensor may have in PyTorch's model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tfwd.pretrained.flatten_order.joinable import Joinable


class Place(Joinable):
    """Place of an axis in one tensor, and in all tensors that have the same axes.

    Two axes of a tensor may be equal, for example the two axes of steps in a matrix of scores.
    Their places differ.
    """


Arrangement = tuple[Place, ...]  # places in PyTorch's order


class Layout(Joinable):
    """The orders of axes that PyTorch's model may have for a tensor.

    Layers that need a certain order restrict them. If two layers need different orders, PyTorch's
    model permutes the axes somewhere. The order is then contradictory, and stays so.

    Args:
        possible: Possible arrangements. None: any, if nothing else is known.
        default: Arrangement to assume if no layer restricts the possible ones. Default None.
        only: Arrangement to which later layers may restrict a layout whose possible ones are not
            known. Default None: to any.
        is_open: bool. True if later layers may restrict the arrangements, because nothing before
            the tensor shows them. Default False.
        reason: str. Clause that says why the order is unknown, if it is.
        natural: Places of axes, usually all but the last, that PyTorch has in this order among each
            other. Default none.
        is_contradictory: bool. True if PyTorch's model must permute the axes somewhere. Default
            False.
        is_sequence: bool. True for a contradictory order of which a layer on the last axis shows
            that PyTorch's model has Keras's order again. Default False.
    """

    def __init__(
        self,
        possible: Iterable[Arrangement] | None,
        *,
        reason: str,
        default: Arrangement | None = None,
        only: Arrangement | None = None,
        is_open: bool = False,
        natural: Sequence[Place] = (),
        is_contradictory: bool = False,
        is_sequence: bool = False,
    ) -> None:
        super().__init__()
        self._possible = None if possible is None else set(possible)
        self._default, self._only = default, only
        self._is_open = is_open
        self._reason = reason
        self._natural = tuple(natural)
        self._is_contradictory = is_contradictory
        self._is_sequence = is_sequence
        self._is_restricted = False
        # Layout of one time step, if the second axis is time and the layer before ran on steps.
        self.step: Layout | None = None

    @property
    def reason(self) -> str:
        """Returns why the order is unknown, if it is."""
        return self.find()._reason

    @property
    def is_contradictory(self) -> bool:
        """Returns True if PyTorch's model must permute the axes somewhere."""
        return self.find()._is_contradictory

    @property
    def is_sequence(self) -> bool:
        """Returns True if a layer on the last axis shows a contradictory order again."""
        return self.find()._is_sequence

    @property
    def natural(self) -> Arrangement:
        """Returns the places of axes that PyTorch has in Keras's order among each other."""
        return tuple(place.find() for place in self.find()._natural)

    def is_natural(self, places: Sequence[Place]) -> bool:
        """Returns True if PyTorch is known to have some places in this order among each other."""
        wanted = tuple(place.find() for place in places)
        natural = tuple(place for place in self.natural if place in wanted)
        return natural == wanted or self.arrangement(wanted) == wanted

    @property
    def is_open(self) -> bool:
        """Returns True if nothing before the tensor shows the order, and no layer has shown it."""
        return self.find()._is_open and not self.is_contradictory and self.known is None

    @property
    def is_restricted(self) -> bool:
        """Returns True if a layer restricted the arrangements."""
        return self.find()._is_restricted

    @property
    def possible(self) -> set[Arrangement] | None:
        """Returns the possible arrangements, None if any is possible or none is consistent."""
        layout = self.find()
        if layout._possible is None or layout._is_contradictory:
            return None
        return {tuple(place.find() for place in each) for each in layout._possible}

    @property
    def known(self) -> Arrangement | None:
        """Returns the only possible arrangement; None if there are several."""
        possible = self.possible
        return next(iter(possible)) if possible is not None and len(possible) == 1 else None

    def arrangement(self, places: Sequence[Place]) -> Arrangement | None:
        """Returns the order of some places in PyTorch; None if it is not known."""
        layout = self.find()
        if layout._is_contradictory:
            return None
        wanted = {place.find() for place in places}
        if len(wanted) < 2:
            return tuple(wanted)
        possible = self.possible
        if possible is not None:
            found = {tuple(p for p in each if p in wanted) for each in possible}
            if len(found) == 1:
                return found.pop()
        if layout._default is not None:
            default = (place.find() for place in layout._default)
            return tuple(place for place in default if place in wanted)
        return None

    def are_neighbours(self, places: Sequence[Place]) -> bool:
        """Returns True if no other axis is between some places, in all possible arrangements."""
        wanted = {place.find() for place in places}
        possible = self.possible
        if possible is None:
            default = self.find()._default
            possible = {tuple(place.find() for place in default)} if default else set()
        for each in possible:
            numbers = [number for number, place in enumerate(each) if place in wanted]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                return False
        return bool(possible)

    def allows(self, arrangement: Arrangement) -> bool:
        """Returns True if an arrangement is one of those that are possible."""
        possible = self.possible
        if self.is_contradictory:
            return False
        return (
            self.is_open if possible is None else tuple(p.find() for p in arrangement) in possible
        )

    def restrict(self, arrangements: Iterable[Arrangement], reason: str) -> bool:
        """Restricts the possible arrangements to some. Returns False if none of them is possible.

        Args:
            arrangements: The arrangements that a layer needs.
            reason: Clause that says why the order is unknown, if none of them is possible.
        """
        layout = self.find()
        wanted = {tuple(place.find() for place in each) for each in arrangements}
        possible = self.possible
        if possible is None and not self.is_open:
            return False
        if possible is None and layout._only is not None:
            wanted &= {tuple(place.find() for place in layout._only)}
        left = wanted if possible is None else possible & wanted
        if not left:
            self.contradict((layout._is_restricted and layout._reason) or reason)
            return False
        if left != possible:
            layout._possible, layout._is_restricted, layout._reason = left, True, reason
        return True

    def with_places(self, new: dict[Place, Place]) -> Layout:
        """Returns a layout of other places that is in the same state.

        Args:
            new: The new place of each place.
        """
        layout = self.find()
        places = {old.find(): place for old, place in new.items()}

        def renamed(arrangement: Arrangement | None) -> Arrangement | None:
            found = None if arrangement is None else [places[p.find()] for p in arrangement]
            return None if found is None else tuple(found)

        possible = [renamed(each) for each in layout._possible or ()]
        same = Layout(
            possible if layout._possible is not None else None,  # type: ignore[arg-type]
            reason=layout._reason,
            default=renamed(layout._default),
            is_open=layout._is_open,
            natural=[places[place.find()] for place in layout._natural],
            is_contradictory=layout._is_contradictory,
            is_sequence=layout._is_sequence,
        )
        same._is_restricted = layout._is_restricted
        return same

    def contradict(self, reason: str, *, is_sequence: bool = False) -> None:
        """Marks the order as contradictory."""
        layout = self.find()
        if not layout._is_contradictory:
            layout._is_contradictory, layout._reason = True, reason
            layout._is_sequence = is_sequence

    def require(self, arrangement: Arrangement) -> None:
        """Requires that later layers show one arrangement, if they show any."""
        layout = self.find()
        if layout._possible is None:
            layout._only = arrangement

    def drop_default(self, reason: str) -> None:
        """Assumes no order any more. Layers may still show it."""
        layout = self.find()
        if layout.step is not None:
            layout.step.drop_default(reason)
        if layout._default is not None:
            layout._default, layout._reason = None, reason

    def drop_default_unless(self, known: Arrangement | None, reason: str) -> None:
        """Assumes no order any more, if it is not a known one."""
        default = self.find()._default
        if default is None or known is None or tuple(p.find() for p in default) != known:
            self.drop_default(reason)

    def join(self, other: Layout, reason: str) -> Layout:
        """Makes the layouts of two tensors with the same places the same, and returns the layout.

        A layout of which nothing is known is left alone. The sum then has the other one.
        """
        mine, others = self.find(), other.find()
        if mine is others:
            return mine
        for one, two in ((mine, others), (others, mine)):
            if one._is_contradictory:
                return one
            if one._possible is None and not one._is_open:
                return one if two.is_open else two
        for one, two in ((mine, others), (others, mine)):
            if one._possible is None and not two._is_open:  # features that a reshape divided
                one.drop_default_unless(two.known, reason)
                return two
        one, two = (mine, others) if not mine._is_open else (others, mine)
        first, second = one.possible, two.possible
        one.become_one_with(two)
        if first is None:
            one._possible = second
        elif second is not None:
            one._possible = first & second
            if not one._possible:
                one.contradict(reason)
        one._is_restricted |= two._is_restricted
        one._is_open &= two._is_open
        one._natural = max(one._natural, two._natural, key=len)
        if one._default is None or two._default is None:
            one._default = None
        return one


def orders_with_last(places: Sequence[Place], last: Place) -> set[Arrangement]:
    """Returns all arrangements of places with one of them last, and the first one first."""
    others = [place for place in places[1:] if place is not last]
    return {(places[0], *order, last) for order in itertools.permutations(others)}


def orders_at_end(places: Sequence[Place], last: set[Place]) -> set[Arrangement]:
    """Returns all arrangements of places with some of them last, and the first one first."""
    found = [place.find() for place in places]
    orders = itertools.permutations(found[1:])
    return {(found[0], *order) for order in orders if set(order[len(order) - len(last) :]) == last}

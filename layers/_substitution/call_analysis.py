"""`CallAnalysis`: what a trace of a layer's call has found."""

from __future__ import annotations

from typing import NamedTuple

import keras


class CallAnalysis(NamedTuple):
    """The facts that `traced_call_analysis` found about a call.

    Attributes:
        impure: Reason why the call cannot run again, as the end of a sentence. "" if it can run
            again.
        updated: Variables that the call updates, under either training flag.
        losses: Number of losses that the call adds, the larger of the two flags.
        extra: Variables that the call reads and its layer does not list.
        seen: bool. The call could be traced, so it reads no weight without Keras.
        shared: bool. The analysis holds for all layers with the same signature.
        taken: bool. The call uses floating tensors that are not among its arguments. It is True
            even if they need no gradient now, because a later call may run under another tape.
    """

    impure: str
    updated: list[keras.Variable]
    losses: int
    extra: list[keras.Variable]
    seen: bool = True
    taken: bool = False
    shared: bool = False

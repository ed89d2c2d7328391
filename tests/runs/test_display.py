"""Terminal output during a run."""

import io

from rich.console import Console

from tfwd.lm.losses import PERPLEXITY
from tfwd.runs.training.display import Display


def test_lines_come_no_closer_than_asked():
    out, now = io.StringIO(), [0.0]
    display = Display(PERPLEXITY, Console(file=out, width=80), seconds=5, clock=lambda: now[0])
    with display:
        display.epoch("epoch 1/2", windows=100, done=0)
        for window in range(1, 13):
            now[0] += 1
            display.window(window)
        display.line("[best] epoch")
    assert out.getvalue().splitlines() == ["epoch 1/2  5%", "epoch 1/2  10%", "[best] epoch"]


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal cannot move the cursor
    out = io.StringIO()
    display = Display(
        PERPLEXITY, Console(file=out, width=100, force_terminal=True, legacy_windows=False)
    )
    with display:
        display.epoch("epoch 2/9", windows=4, done=0)
        display.window(3, loss=2.0, tokens_per_second=50_000, seconds_left=3700)
        display.line("a line")
    text = out.getvalue()
    for part in ("epoch 2/9", "75%", "loss 2.000", "perplexity 7.39", "50,000 tokens/s", "a line"):
        assert part in text
    assert "1:01:40 left" in text and "━" in text

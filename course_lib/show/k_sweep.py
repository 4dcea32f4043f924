"""The k sweep: recall and text at every k, recorded for many prompts, and made again on demand."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

from course_lib.engine import Engine
from course_lib.lab.intervals import wilson
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.prompt_study import Answer, prompt_study
from course_lib.lab.runs import load_run
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.k_sweep_picture import KSweepPicture
from course_lib.show.models import shipped_engine
from course_lib.show.text import fmt, percent

# Set-up → recorded run, importance rule; "one flag" drives prefill with the same k.
SETUPS: dict[str, tuple[str, str]] = {
    "exact prefill": ("needle_k_sweep", "all_queries"),
    "one flag": ("needle_one_flag", "all_queries"),
    "importance off": ("needle_no_importance", "none"),
    "last window": ("needle_last_window", "last_window"),
}
KS = ("exact", 32, 16, 8, 4, 2, 1)
TILES = 60  # prompts that every recorded run has
SOURCES = ("recorded", "live")
# From the first choice closer than this on, a text may differ between machines.
SAFE_MARGIN = 1e-2


class KSweepExplorer(Explorer):
    """What the model says at every k: recorded recall of a set-up, and the text of one prompt.

    engine: for "live" (default: the shipped model, loaded when first needed). setup: of SETUPS.
    k: of KS. prompt: one of the first 60 prompts of the recorded run. text: "recorded" shows what
    the run wrote down, "live" also runs the prompt on this machine.
    """

    alt = ("recall by k with its 95 % interval, for the chosen set-up in front of the others; "
           "below, the prompts recalled and lost at this k, and the text of one of them")
    question = ("at which k does recall fall off, and does the text break at the same k? Decide "
                "before you move k.")
    drawing = KSweepPicture

    def __init__(
        self, engine: Engine | None = None, *, setup: str = "exact prefill",
        k: int | str = 32, prompt: int = 0, text: str = "recorded",
    ) -> None:
        self._engine = engine
        super().__init__({
            "setup": dropdown("set-up", tuple(SETUPS), setup, "what besides decode's k is set"),
            "k": steps("k", KS, k, "blocks that decode reads"),
            "prompt": number("prompt", TILES - 1, prompt, "whose text is shown"),
            "text": dropdown("text", SOURCES, text, "recorded, or also made on this machine"),
        })

    @cached_property
    def engine(self) -> Engine:
        return self._engine or shipped_engine()

    def compute(
        self, setup: str = "exact prefill", k: int | str = 32, prompt: int = 0,
        text: str = "recorded",
    ) -> dict[str, Any]:
        """Curves of every set-up, {k: (recalled, prompts, low, high, answer perplexity)}, and the
        record of one prompt; "live": the Answer of this machine, or None."""
        run = load(SETUPS[setup][0])
        mine = {r["index"]: r for r in run["records"] if r["k"] == k}
        record, exact = mine[prompt], self._record(run, prompt, "exact")
        return {
            "setup": setup, "k": k, "prompt": prompt, "source": SETUPS[setup][0],
            "curves": {name: curve(source) for name, (source, _) in SETUPS.items()},
            "tiles": [bool(mine[i]["recalled"]) for i in range(TILES)],
            "value": record["value"], "recalled": bool(record["recalled"]),
            "identical": bool(record["identical"]), "text": record["text"],
            "exact_text": exact["text"], "needle_block": record["needle_block"],
            "live": self.live(setup, k, prompt) if text == "live" else None,
        }

    @staticmethod
    def _record(run: dict[str, Any], prompt: int, k: int | str) -> dict[str, Any]:
        return next(r for r in run["records"] if r["index"] == prompt and r["k"] == k)

    def live(self, setup: str, k: int | str, prompt: int) -> Answer:
        """The same prompt on this machine; its prefill and answers are kept."""
        source, rule = SETUPS[setup]
        options = NeedleOptions(seed=load(source)["options"]["seed"])
        blocks = None if isinstance(k, str) else k
        study = prompt_study(self.engine, prompt_of(self.engine, options, prompt),
                             prefill_k=blocks if setup == "one flag" else None)
        return study.answer(blocks, importance=rule)

    def react(self) -> None:
        if self.params["text"] == "live":
            self._busy("prefill and answer on this machine")
        self._refresh()

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result, self)


@lru_cache
def load(name: str) -> dict[str, Any]:
    """A recorded run, read once."""
    return load_run(name)


@lru_cache
def curve(name: str) -> dict[int | str, tuple[int, int, float, float, float]]:
    """{k: (recalled, prompts, low, high, answer perplexity)} of a recorded run."""
    rows = {}
    for row in load(name)["summary"]:
        hits = round(row["recall"] * row["prompts"])
        low, high = wilson(hits, row["prompts"])
        rows[row["k"]] = (hits, row["prompts"], low, high, row["answer_perplexity"])
    return rows


def describe(r: dict[str, Any], explorer: KSweepExplorer) -> str:
    """The text twin of one `compute` result."""
    mine = r["curves"][r["setup"]]
    prompts = next(iter(mine.values()))[1]
    lines = [f"recorded, data/runs/{r['source']}.json: {r['setup']}, {prompts} prompts",
             f"{'k':>7} {'recalled':>9} {'recall':>8}   {'95 % interval':18} answer perplexity"]
    for k, (hits, n, low, high, perplexity) in mine.items():
        mark = "  ← shown" if k == r["k"] else ""
        span = f"{percent(low)} … {percent(high)}"
        lines.append(f"{k!s:>7} {f'{hits}/{n}':>9} {percent(hits / n):>8}   {span:18} "
                     f"{fmt(perplexity):>17}{mark}")
    lines += [f"other set-ups at k = {r['k']}: " + ", ".join(
        f"{name} {percent(c[r['k']][0] / c[r['k']][1])}" for name, c in r["curves"].items()
        if name != r["setup"])]
    lost = [i for i, ok in enumerate(r["tiles"]) if not ok]
    lines += [f"of the first {TILES} prompts lost: "
              + ("none" if not lost else "all" if len(lost) == TILES else
                 f"{len(lost)}: {', '.join(map(str, lost[:12]))}"
                 + (" …" if len(lost) > 12 else "")), "",
              f"prompt {r['prompt']}, asked for {r['value']!r}, needle in block "
              f"{r['needle_block']}",
              f"exact:    {r['exact_text']!r}",
              f"recorded: {r['text']!r}, {'recalled' if r['recalled'] else 'not recalled'}"
              + (", as exact" if r["identical"] else "")]
    if r["live"] is not None:
        lines.append(f"live:     {_safe(r['live'], explorer.engine)}")
    return "\n".join(lines)


def _safe(answer: Answer, engine: Engine) -> str:
    """The text as far as rounding, which differs between machines, cannot change it."""
    close = [i for i, margin in enumerate(answer.margins) if margin < SAFE_MARGIN]
    text = repr(answer.text) if not close else (
        f"{engine.decode(answer.ids[: close[0]])!r}… (then a near tie)")
    return f"{text}, {'recalled' if answer.recalled else 'not recalled'}"

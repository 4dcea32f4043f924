"""Block selection at work: one query of the shipped model, its blocks, and why each is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ipywidgets import Button, Layout

from course_lib.engine import Engine
from course_lib.engine.prefill import IMPORTANCE_RULES
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of
from course_lib.lab.prompt_study import BLOCK_SIZE, Answer, PromptStudy, prompt_study
from course_lib.lab.prompts import NeedlePrompt
from course_lib.show.block_picture import BlockPicture
from course_lib.show.controls import dropdown, number, replace_options, steps
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.style import REASON
from course_lib.show.text import percent
from course_lib.show.why import why_block
from course_lib.sparse import n_blocks

KS = (1, 2, 4, 8, 16, 32, 64, "all")
PREFILL_KS = (1, 2, 4, 8, 16, 32, "exact")
BLOCK_SIZES = (16, 32, 64, 128)
N_PROBES = (1, 2, 4, 8, 16, 32)
PROMPTS = 4
# Two backends differ by about 1e-4 in a logit; from the first choice closer than this on, a text
# may differ between machines and the text twin stops.
SAFE_MARGIN = 1e-2


class BlockSelectionExplorer(Explorer):
    """Which blocks one query head reads, why, and what the model then says.

    engine: default the shipped model. prompts: needle prompts to choose from; default the first
    four of `./course needle --tokens TOKENS`. prompt, prefill_k ("exact" or blocks that a
    mini-batch of the prompt reads), step (token of the answer), layer, head (query head),
    block_size, k (of decode), n_probe, importance, block: where the controls start; layer, head
    and step left out show the query that reads the needle's value, block left out the needle's
    block.

    The query is the one that exact decode of the exact answer asks at that step; the answer is a
    real run.
    """

    question = ("This query is about to write the needle's value. Which blocks does it read at "
                "this k: will the needle's be among them, and by which letter?")

    alt = ("one column per block: a letter says why it is read or not; below, its share of exact "
           "attention, its probe score and its importance; at the bottom the generated text")
    drawing = BlockPicture

    def __init__(
        self, engine: Engine | None = None, *, prompts: Sequence[NeedlePrompt] | None = None,
        tokens: int = 2061, prompt: int = 0, prefill_k: int | str = "exact",
        layer: int | None = None, head: int | None = None, step: int | None = None,
        block_size: int = BLOCK_SIZE, k: int | str = 32, n_probe: int = 8,
        importance: str = "all_queries", block: int | None = None,
    ) -> None:
        self.engine = engine or shipped_engine()
        self.prompts = tuple(prompts) if prompts is not None else tuple(
            prompt_of(self.engine, NeedleOptions(tokens=tokens), i) for i in range(PROMPTS))
        names = {f"{i}: {p.fact.name}'s {p.fact.attribute}": i
                 for i, p in enumerate(self.prompts)}
        choose = dropdown("prompt", names, prompt, "which needle is hidden in the notes")
        prefill = steps("prefill k", PREFILL_KS, prefill_k,
                        "blocks that each mini-batch of the prompt read")
        size = steps("block size", BLOCK_SIZES, block_size, "tokens in a block")
        study = self.study(prompt, prefill_k, block_size)
        layer, head, step, block = self._place(study, layer, head, step, block)
        config = self.engine.config
        super().__init__({
            "prompt": choose,
            "prefill_k": prefill,
            "step": dropdown("step", self._step_names(study), step,
                             "which token of the answer is being made"),
            "layer": number("layer", config.num_hidden_layers - 1, layer, "layer of the model"),
            "head": number("query head", config.num_attention_heads - 1, head,
                           "every query head selects its own blocks"),
            "block_size": size,
            "k": steps("decode k", KS, k, "how many blocks decode reads"),
            "n_probe": steps("n_probe", N_PROBES, n_probe, "tokens sampled in each block"),
            "importance": dropdown("importance", IMPORTANCE_RULES, importance,
                                   "which prefill queries count"),
            "block": number("block", self._last_block(study), block,
                            "the block to explain below"),
        }, extras=self._jumps())

    def study(self, prompt: int, prefill_k: int | str = "exact",
              block_size: int = BLOCK_SIZE) -> PromptStudy:
        """The prefilled prompt; shared with other explorers of this engine."""
        blocks = None if prefill_k == "exact" else int(prefill_k)
        return prompt_study(self.engine, self.prompts[prompt], prefill_k=blocks,
                            block_size=block_size)

    def _chosen_study(self) -> PromptStudy:
        params = self.params
        return self.study(params["prompt"], params["prefill_k"], params["block_size"])

    @staticmethod
    def _place(study: PromptStudy, layer: int | None, head: int | None, step: int | None,
               block: int | None) -> tuple[int, int, int, int]:
        layer = study.retrieval_head[0] if layer is None else layer
        head = study.retrieval_head[1] if head is None else head
        step = study.value_step if step is None else step
        return layer, head, step, study.needle_block if block is None else block

    def _step_names(self, study: PromptStudy) -> dict[str, int]:
        pairs = [_fed_and_next(study, s) for s in range(study.record.steps)]
        return {f"{s}: {fed!r} → {after!r}": s for s, (fed, after) in enumerate(pairs)}

    @staticmethod
    def _last_block(study: PromptStudy) -> int:
        return (study.record.context(study.record.steps - 1) - 1) // study.block_size

    def _jumps(self) -> list[Button]:
        targets = {
            "needle's block": lambda r: r["needle_block"],
            "most attention": lambda r: int(np.argmax(r["mass"])),
            "last block": lambda r: r["n_blocks"] - 1,
        }
        buttons = []
        for name, target in targets.items():
            button = Button(description=name, tooltip=f"explain the block: {name}",
                            layout=Layout(width="12em"))
            button.on_click(lambda _, target=target: self._jump(target))
            buttons.append(button)
        return buttons

    def _jump(self, target: Any) -> None:
        with self._errors_in_view():
            self.controls["block"].value = target(self._current())

    def compute(
        self, prompt: int = 0, prefill_k: int | str = "exact", layer: int | None = None,
        head: int | None = None, step: int | None = None, block_size: int = BLOCK_SIZE,
        k: int | str = 32, n_probe: int = 8, importance: str = "all_queries",
        block: int | None = None, answer: bool = True,
    ) -> dict[str, Any]:
        """The selection of one query with everything said about it; defaults as the class's.

        "exact_answer" is that of exact prefill and exact decode, "answer" that of these controls;
        answer=False leaves the generated text of a k that was not run yet as None.
        """
        study = self.study(prompt, prefill_k, block_size)
        layer, head, step, block = self._place(study, layer, head, step, block)
        record = study.record
        mass = record.attention_mass(step, layer, head)
        # A step early in the answer may have one block less than the last one.
        block = min(block, len(mass) - 1)
        k_blocks = len(mass) if k == "all" else int(k)
        selection = record.selection(step, layer, head, k_blocks=k_blocks, n_probe=n_probe,
                                     importance=study.importance(importance))
        read = np.zeros(len(mass), bool)
        read[selection.ids] = True
        fed, after = _fed_and_next(study, step)
        # All blocks of this step may be all but a few of a later step of the answer.
        in_the_end = n_blocks(record.prompt_tokens + MAX_NEW_TOKENS, block_size)
        k_answer = in_the_end if k == "all" else k_blocks
        ready = answer or study.has_answer(k_answer, n_probe, importance)
        return {
            "prompt": prompt, "question": study.prompt.question, "n": record.context(step),
            "prefill_k": prefill_k, "block_size": block_size,
            "needle": study.prompt.fact.sentence, "needle_blocks": list(study.needle_blocks),
            "needle_block": study.needle_block, "layer": layer, "head": head, "step": step,
            "fed": fed, "next": after, "k": k, "n_blocks": len(mass), "n_probe": n_probe,
            "importance": importance, "selection": selection, "reason": selection.reason,
            "read": read, "mass": mass, "block": block,
            "why": why_block(selection, block, k_blocks), "exact_answer": study.exact.answer(),
            "answer": study.answer(k_answer, n_probe, importance) if ready else None,
        }

    def adjust(self, name: str) -> None:
        if name not in ("prompt", "prefill_k", "block_size"):
            return
        self._busy("prefill and exact answer of this prompt" if name == "prompt" else
                   f"the same prompt, prefill k = {self.controls['prefill_k'].value}")
        study = self._chosen_study()
        if name == "prompt":
            replace_options(self.controls["step"], self._step_names(study), study.value_step)
        if name != "prefill_k":
            self.controls["block"].max = self._last_block(study)
            self.controls["block"].value = study.needle_block

    def react(self) -> None:
        params, study = self.params, self._chosen_study()
        if not study.has_importance(params["importance"]):
            self._busy(f"a prefill that counts importance by {params['importance']}")
        glance = self.compute(**params, answer=False)
        if glance["answer"] is None:
            self._publish(glance)
            self._busy(f"what the model says at k = {params['k']}")
            glance = self.compute(**params)
        self._publish(glance)

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result, self.engine)


def _fed_and_next(study: PromptStudy, step: int) -> tuple[str, str]:
    ids = study.record.generation.ids
    after = study.engine.decode([ids[step + 1]]) if step + 1 < len(ids) else "(end)"
    return study.engine.decode([ids[step]]), after


def describe(r: dict[str, Any], engine: Engine) -> str:
    """The text twin of one `compute` result."""
    needle, block, mass, read = r["needle_block"], r["block"], r["mass"], r["read"]
    counts = "  ".join(f"{m.letter} {m.label} {r['reason'].count(name)}"
                       for name, m in REASON.items())
    lines = [
        f"{r['question']}  {r['n']} tokens in {r['n_blocks']} blocks of {r['block_size']}; needle "
        f"{r['needle']!r} in block {needle}",
        f"layer {r['layer']}, query head {r['head']}, step {r['step']}: fed {r['fed']!r}, exact "
        f"attention says {r['next']!r}",
        f"prefill k = {r['prefill_k']}, decode k = {r['k']}, n_probe {r['n_probe']}, importance "
        f"{r['importance']}",
        counts,
        f"exact attention's weight on the blocks read: {percent(mass[read].sum())}; on the "
        f"needle's block: {percent(mass[needle])}, {'read' if read[needle] else 'not read'}",
        "", f"Why block {block}{' (the needle)' if block == needle else ''}? "
        f"Exact attention gives it {percent(mass[block])}.", r["why"], "",
        f"exact says: {_said(r['exact_answer'], engine)}",
    ]
    if r["answer"] is not None:
        same = "the same as exact" if r["answer"].identical else "not the same as exact"
        lines.append(f"k = {r['k']} says: {_said(r['answer'], engine)}, {same}")
    return "\n".join(lines)


def _said(answer: Answer, engine: Engine) -> str:
    """The text as far as no rounding can change it, and whether it holds the value."""
    close = [i for i, margin in enumerate(answer.margins) if margin < SAFE_MARGIN]
    text = repr(answer.text)
    if close:
        safe = engine.decode(answer.ids[: close[0]])
        text = f"{safe!r}… (then a near tie: margin below {SAFE_MARGIN})"
    return f"{text}, {'recalled' if answer.recalled else 'not recalled'}"

"""The engine and transformers with the weights of one GGUF file, both in float32."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from course_lib.engine import Engine
from course_lib.known_models import installed_file
from course_lib.lab.margins import Clearness, clearness


def prompt_ids(engine: Engine, kind: str, text: str) -> list[int]:
    """The ids of a question in the model's chat format, or of a text as it is."""
    if kind == "chat":
        return engine.apply_chat_template([{"role": "user", "content": text}])
    return engine.encode(text)


class TwoEngines:
    """Greedy continuations by both, and how clear their choices are."""

    def __init__(self, engine: Engine):
        file = installed_file("smollm2")
        self.engine = engine
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32).eval()

    def ours(self, ids: list[int], new_tokens: int) -> list[int]:
        """What the engine writes, its end token left out."""
        return self.engine.generate(ids, new_tokens, kv="f32")

    def theirs(self, ids: list[int], new_tokens: int) -> list[int]:
        """What transformers writes, its end token left out."""
        prompt = torch.tensor([ids])
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt),
                                  max_new_tokens=new_tokens, do_sample=False)[0, len(ids):].tolist()
        ends = [place for place, token in enumerate(out)
                if token in self.engine.config.eos_token_ids]
        return out[: ends[0]] if ends else out

    def logits(self, ids: list[int]) -> np.ndarray:
        """transformers' logits at every position, float32 `[n, vocab]`."""
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].numpy()

    def clearness(self, ids: list[int], written: list[int], new_tokens: int) -> Clearness:
        """How clear every choice was in writing `written` after `ids`: that of each token, and of
        the end where it came before `new_tokens`."""
        both = ids + written
        choices = len(written) + (len(written) < new_tokens)
        steps = slice(len(ids) - 1, len(ids) - 1 + choices)
        return clearness(self.engine.forward(both)[steps], self.logits(both)[steps])

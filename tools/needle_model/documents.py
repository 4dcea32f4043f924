"""Training documents: notes, then chat turns that ask about them, with weights and hints.

A document is a pure function of (seed, length). Besides token ids it carries one loss weight per
token (how much predicting that token counts) and, for the first steps of training, hints: for
chosen attention heads, which span of positions a query position should look at.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from course_lib.lab import world

# Loss weights by what the token is. Unpredictable tokens (a fresh name, filler) teach nothing.
W_UNPREDICTABLE, W_GLUE, W_ANSWER_GLUE, W_ANSWER_KEY, W_VALUE = 0.01, 0.03, 0.15, 0.5, 1.0

# (layer, head) that receives each kind of hint. First layer: gather the name of the sentence (or
# the variable of the line), its attribute (or what the variable takes), the token before. Second
# layer: where the answer's next token stands in the notes; the word to copy from the question.
SUBJECT_HEAD, SOURCE_HEAD, ATTRIBUTE_HEAD, PREVIOUS_HEAD = (0, 0), (0, 1), (0, 2), (0, 3)
COPY_HEADS, QUESTION_HEAD = ((1, 0), (1, 2)), (1, 1)

Span = tuple[int, int]


@dataclass
class Document:
    """Token ids, loss weights, value flags and hints `(layer, head) → [(query, first, last)]`.

    probes `[(query, first, last)]`: for every token of a repeated value, the span of the fact
    from its attribute to its end. A block probe reads every fourth key, so four neighbours that
    all answer the query are enough for it never to miss the fact.
    """

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    is_value: list[bool] = field(default_factory=list)
    hints: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    probes: list[tuple[int, int, int]] = field(default_factory=list)

    def hint(self, head: tuple[int, int], query: int, span: Span) -> None:
        self.hints.setdefault(head, []).append((query, span[0], span[1] - 1))


class DocumentWriter:
    """Writes one document; keeps a cache of encoded pieces because the world is small."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece that begins and ends at a pre-token boundary."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 50_000:
                self._cache[text] = ids
        return ids

    def _add(self, doc: Document, text: str, weight: float, value: bool = False) -> Span:
        ids = self.encode(text)
        start = len(doc.ids)
        doc.ids += ids
        doc.weights += [weight] * len(ids)
        doc.is_value += [value] * len(ids)
        return start, len(doc.ids)

    def _add_fact(
        self, doc: Document, fact: world.Fact, end: str, weights: tuple[float, float, float]
    ) -> dict[str, Span]:
        """Append a fact sentence; weights are those of its key (name, attribute), glue, value."""
        w_key, w_glue, w_value = weights
        spans: dict[str, Span] = {}
        for role, text in fact.parts[:-1]:
            weight = {"name": w_key, "attribute": w_key, "value": w_value}.get(role, w_glue)
            scored = role == "value" and w_value == W_VALUE
            spans[role] = self._add(doc, text, weight, value=scored)
        last = self._add(doc, end, w_glue)[1]
        for query in range(spans["name"][1], last):
            doc.hint(SUBJECT_HEAD, query, spans["name"])
        for query in range(spans["attribute"][1], last):
            doc.hint(ATTRIBUTE_HEAD, query, spans["attribute"])
        for query in range(spans["value"][0] + 1, spans["value"][1]):
            doc.hint(PREVIOUS_HEAD, query, (query - 1, query))
        spans["answering"] = (spans["attribute"][1] - 1, last)
        return spans

    def _copy_value(self, doc: Document, spans: dict[str, Span], source: dict[str, Span]) -> None:
        self._copy_hints(doc, spans["value"], source["value"], COPY_HEADS)
        first, last = source["answering"]
        for query in range(spans["value"][0] - 1, spans["value"][1] - 1):
            doc.probes.append((query, first, last - 1))

    def _copy_hints(self, doc: Document, target: Span, source: Span, heads) -> None:
        """The token before target[i] should look at source[i]: where its successor stands."""
        for offset in range(min(target[1] - target[0], source[1] - source[0])):
            at = source[0] + offset
            for head in heads:
                doc.hint(head, target[0] + offset - 1, (at, at + 1))

    def _add_assignment(self, doc: Document, line: world.Assignment) -> dict[str, Span]:
        spans: dict[str, Span] = {}
        for role, text in line.parts[:-1]:
            spans[role] = self._add(doc, text, W_GLUE if role == "glue" else W_UNPREDICTABLE)
        last = self._add(doc, ".\n", W_GLUE)[1]
        for query in range(spans["variable"][1], last):
            doc.hint(SUBJECT_HEAD, query, spans["variable"])
        for query in range(spans["source"][0] + 1, last):
            doc.hint(SOURCE_HEAD, query, spans["source"])
        for query in range(spans["variable"][0] + 1, spans["variable"][1]):
            doc.hint(PREVIOUS_HEAD, query, (query - 1, query))
        spans["line_end"] = (spans["source"][0], last)
        return spans

    def write(self, seed: int, length: int) -> Document:
        """One document of at most `length` tokens for this seed."""
        rng = random.Random(seed)
        doc = Document()
        turns = max(1, int(length * rng.uniform(0.15, 0.35)) // 26)
        turns = min(turns, 24)
        budget = length - 27 * turns - 6
        with_chains = rng.random() < 0.4
        notes = _Notes(rng, length, with_chains)
        self._add(doc, "<|im_start|>", 0.0)
        self._add(doc, "user", 0.0)
        self._add(doc, "\n", 0.0)
        self._add(doc, "Read these notes", W_GLUE)
        self._add(doc, ".\n", W_GLUE)
        facts: list[tuple[world.Fact, dict[str, Span]]] = []
        chains: dict[str, list[tuple[world.Assignment, dict[str, Span]]]] = {}
        while len(doc.ids) < budget - 12:
            self._write_line(doc, rng, notes, facts, chains)
        self._write_turns(doc, rng, turns, length, facts, list(chains.values()))
        return doc

    def _write_line(self, doc, rng, notes: _Notes, facts, chains) -> None:
        kind = notes.next_kind()
        if kind == "filler":
            text = world.filler_sentence(rng)
            self._add(doc, text[:-1], notes.filler_weight)
            self._add(doc, ".\n", W_GLUE)
        elif kind == "restate" and facts:
            fact, source = rng.choice(facts)
            spans = self._add_fact(doc, fact, ".\n", (W_UNPREDICTABLE, W_GLUE, W_VALUE))
            self._copy_value(doc, spans, source)
        elif kind == "chain":
            key, line = notes.next_assignment()
            chains.setdefault(key, []).append((line, self._add_assignment(doc, line)))
        else:
            fact = notes.next_fact()
            weights = (W_UNPREDICTABLE, W_GLUE, W_UNPREDICTABLE)
            facts.append((fact, self._add_fact(doc, fact, ".\n", weights)))

    def _write_turns(self, doc, rng, turns, length, facts, chains) -> None:
        order = list(range(len(facts)))
        rng.shuffle(order)
        for turn in range(turns):
            if len(doc.ids) > length - 30:
                return
            if turn:
                for text in ("<|im_start|>", "user", "\n"):
                    self._add(doc, text, W_GLUE)
            if chains and rng.random() < 0.5:
                if not self._chain_turn(doc, chains.pop(rng.randrange(len(chains))), length):
                    return
            elif order:
                self._fact_turn(doc, *facts[order.pop()])
            else:
                return
            self._add(doc, "<|im_end|>", W_ANSWER_GLUE)
            self._add(doc, "\n", W_GLUE)

    def _open_answer(self, doc: Document) -> None:
        for text in ("<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"):
            self._add(doc, text, W_GLUE)

    def _fact_turn(self, doc: Document, fact: world.Fact, source: dict[str, Span]) -> None:
        self._add(doc, "What is", W_GLUE)
        name = self._add(doc, " " + fact.name, W_UNPREDICTABLE)
        self._add(doc, "'s", W_GLUE)
        attribute = self._add(doc, " " + fact.attribute, W_UNPREDICTABLE)
        self._add(doc, "?", W_GLUE)
        self._open_answer(doc)
        spans = self._add_fact(doc, fact, ".", (W_ANSWER_KEY, W_ANSWER_GLUE, W_VALUE))
        self._copy_value(doc, spans, source)
        self._copy_hints(doc, spans["name"], name, (QUESTION_HEAD,))
        self._copy_hints(doc, spans["attribute"], attribute, (QUESTION_HEAD,))

    def _chain_turn(self, doc: Document, chain, length: int) -> bool:
        lines = [line for line, _ in chain]
        if len(doc.ids) > length - 30 - 6 * len(lines):
            return False
        self._add(doc, f"List the {len(lines)} variables that hold", W_GLUE)
        previous = self._add(doc, " " + lines[0].source, W_UNPREDICTABLE)
        self._add(doc, ".", W_GLUE)
        self._open_answer(doc)
        for i, (line, source) in enumerate(chain):
            if i:
                self._add(doc, ",", W_ANSWER_GLUE)
            at = self._add(doc, " VAR" if i else "VAR", W_ANSWER_GLUE)[0]
            doc.hint(ATTRIBUTE_HEAD, at, previous)
            spans = self._add(doc, " " + line.variable, W_VALUE, value=True)
            doc.hint(COPY_HEADS[1], at, source["line_end"])
            self._copy_hints(
                doc, (spans[0] + 1, spans[1]), (source["variable"][0] + 1, source["variable"][1]),
                (COPY_HEADS[1],),
            )
            previous = spans
        self._add(doc, ".", W_ANSWER_GLUE)
        return True


class _Notes:
    """Draws the lines of one document: its own people, attributes, and mix of kinds."""

    def __init__(self, rng: random.Random, length: int, with_chains: bool):
        self._rng = rng
        self._p_filler = rng.uniform(0.0, 0.6)
        # Filler is learned from a quarter of the documents: scoring it costs as much as a layer.
        self.filler_weight = 2 * W_UNPREDICTABLE if rng.random() < 0.25 else 0.0
        self._p_restate = rng.choice((0.0, 0.0, 0.25))
        self._p_chain = 0.25 if with_chains else 0.0
        made_up_names = rng.choice((0.0, 0.3, 1.0))
        self._made_up_values = rng.choice((0.0, 0.3, 0.6))
        attributes = list(world.ATTRIBUTES)
        rng.shuffle(attributes)
        self._attributes = attributes[: rng.randint(1, len(attributes))]
        facts = length // 8 + 8
        people = max(4, int(facts / len(self._attributes) * rng.uniform(1.0, 2.0)))
        names: dict[str, None] = {}
        while len(names) < people:
            made_up = rng.random() < made_up_names or len(names) >= len(world.NAMES) - 4
            names[world.random_name(rng, made_up=made_up)] = None
        pairs = [(n, a) for n in names for a in self._attributes]
        rng.shuffle(pairs)
        self._pairs = pairs
        self._open_chains: list[list[str]] = []
        self._used_variables: set[str] = set()

    def next_kind(self) -> str:
        u = self._rng.random()
        for kind, p in (
            ("filler", self._p_filler),
            ("chain", self._p_chain),
            ("restate", self._p_restate),
        ):
            if u < p:
                return kind
            u = self._rng.random()
        return "fact" if self._pairs else "filler"

    def next_fact(self) -> world.Fact:
        if not self._pairs:  # every pair is used up: a fresh made-up person
            name = world.random_name(self._rng, made_up=True)
            self._pairs.append((name, self._rng.choice(self._attributes)))
        name, attribute = self._pairs.pop()
        if self._rng.random() < self._made_up_values:
            return world.Fact(name, attribute, world.made_up_word(self._rng))
        return world.Fact(name, attribute, world.random_value(self._rng, attribute))

    def next_assignment(self) -> tuple[str, world.Assignment]:
        variable = world.made_up_word(self._rng)
        while variable in self._used_variables:
            variable = world.made_up_word(self._rng)
        self._used_variables.add(variable)
        extendable = [c for c in self._open_chains if len(c) < 5]
        if extendable and self._rng.random() < 0.65:
            chain = self._rng.choice(extendable)
            line = world.Assignment(variable, chain[-1])
        else:
            chain = [world.number(self._rng, 5)]
            self._open_chains.append(chain)
            line = world.Assignment(variable, chain[0])
        chain.append(variable)
        return chain[0], line

"""Solutions of day 3: one function per A item, one model answer with its rubric per B item."""

from __future__ import annotations


def bpe_encode(merges, text):
    rank = {tuple(pair): r for r, pair in enumerate(merges)}
    tokens = list(text)
    while True:
        found = [(rank[a, b], i) for i, (a, b) in enumerate(zip(tokens, tokens[1:], strict=False))
                 if (a, b) in rank]
        if not found:
            return tokens
        _, i = min(found)
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]


def longest_match(vocab, text):
    index = {}
    for token, word in enumerate(vocab):
        index.setdefault(word, token)
    longest = max((len(word) for word in vocab), default=0)
    ids, at = [], 0
    while at < len(text):
        for length in range(min(longest, len(text) - at), 0, -1):
            word = text[at : at + length]
            if word in index:
                ids.append(index[word])
                at += length
                break
        else:
            raise ValueError(f"no token fits at {at}")
    return ids


def apply_chat_template(messages, add_generation_prompt=True):
    if not messages:
        raise ValueError("there is no message")
    pieces = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"the role {role!r} is unknown")
        if not isinstance(content, str):
            raise ValueError("a content is not a str")
        pieces += [("<|im_start|>", True), (f"{role}\n{content}", False), ("<|im_end|>", True),
                   ("\n", False)]
    if add_generation_prompt:
        pieces += [("<|im_start|>", True), ("assistant\n", False)]
    return pieces


ANSWERS = {
    "d03.b1": """
The Split rule of tokenizer.json cuts a text before any merge, and no merge crosses a cut. The
code holds the same expression as QWEN2, and makes LLAMA3 of it by allowing one to three digits in
one word. With single digits the model has only ever seen 4, 8, 2, 1, 3 as five tokens, and it
copies and compares numbers digit by digit; under the other rule it would get tokens for "482" and
"13", if its vocabulary has them at all, whose rows were hardly trained, and the places of digits
shift. The text comes back all the same, because decoding only joins the pieces.
Rubric: 1 point: the ids differ from those of training although the text is equal; 1 point: what
becomes of a number (rows that are not trained, or other lengths).
""",
    "d03.b2": """
The scan tests every word of the vocabulary for every token of the text: V*n. The index is filled
once, V steps in all; each token of the text then costs at most L look-ups. bpe_steps looks at all
neighbours again after each merge, n(n-1)/2 for a word that becomes one token. None of them is
seen in tokens per second: prefill's and decode's clocks start when the ids exist. One finds them
by timing from the text on (time to first token as the user feels it), by a profile of the whole
request, or by letting one size grow at a time: the vocabulary, the text, the longest word.
Rubric: 1 point: tokenizing is outside the reported time; 1 point: a way to find it that would
work (time from the text, profile, growth).
""",
    "d03.b3": """
Engine.chat turns messages into ids with apply_chat_template; there each piece becomes either the
id of a control token or the ids of its letters by the encoder that has no control tokens;
prompt_ids with template "bare" goes past all of this and encodes the content alone. Check first
whether the prompt's ids are those of the template, by printing them: control tokens as single
ids, the turn closed, the answer begun. Then repeat row 1 (template) and row 2 (text) on the same
prompts, and row 3 if the framework renders the template to a string: characters equal, ids not.
And look at the first token of an empty answer.
Rubric: 1 point: look at the ids, not at the characters; 1 point: a comparison in which only the
frame changes.
""",
}

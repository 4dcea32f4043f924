# %% [markdown]
r"""
# Day 2/30 · 权重文件 The weight file

**You need** Python, NumPy arrays, and to know that a byte has eight bits. From day 1: a model is numbers in a file, and
the engine is the program that runs it.

**You will be able to** read a model file with nothing but `struct` and `json`, and turn its 16-bit numbers into floats bit by
bit · say how much memory it takes to touch one tensor, and check that against the system's own figures · test a
converter, with the inputs on which converters fail.

**Time** 90 minutes, six exercises. The notebook itself runs in a few seconds, offline.

Numbers carry a label where it matters: **this machine** (measured in the cell), **derived** (arithmetic). The plan of this day and
all measurements are this course's own. Words that you miss are in the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import hashlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np

from course_lib import backend, half_floats
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine, generate_from
from course_lib.engine.safetensors_file import SafetensorsFile
from course_lib.errors import CourseError
from course_lib.lab import page_cache, weight_file
from course_lib.lab.prompts import ARTICLE_FACT, build_needle_prompt
from course_lib.paths import MODELS
from course_lib.show.c_source import c_function
from course_lib.show.float_bits import float_bits
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, "·", backend.info().reason)

# %% [markdown]
r"""
## One word in a header

The shipped model is one file of 2,564,472 bytes. Nearly all of them are numbers of two bytes each. We change nothing in these
numbers. In front of them stands a table of contents, and in it the word `F16` 35 times; there, we write `BF16`. That is another
common format of two bytes.

**Predict:** does the engine refuse the file? Does the model still answer the question of day 1?
"""

# %%
folder = MODELS / "needle-qwen3"
raw = (folder / "model.safetensors").read_bytes()
work = tempfile.TemporaryDirectory()  # gone when the notebook's process ends
tensors = weight_file.tensors_of(raw)
renamed = {name: tensor._replace(dtype="BF16") for name, tensor in tensors.items()}

engine = Engine.load(folder)
prompt = build_needle_prompt(engine, 1, tokens=128, fact=ARTICLE_FACT)
print("question:", prompt.question)
print("the file as it is:", engine.decode(generate_from(engine.prefill(prompt.ids), 12).ids))

# %% tags=["nbval-ignore-output"]
refused, said = False, ""
try:
    misread = Engine.load(weight_file.folder_with(folder, Path(work.name, "misread"), renamed))
    said = misread.decode(generate_from(misread.prefill(prompt.ids), 12).ids)
except CourseError as error:
    refused, said = True, str(error)
print("the same numbers, called BF16:", said)

# %%
print("the engine refused the file:", refused, "· the answer is right:", "ramen" in said)
written = Path(work.name, "misread", "model.safetensors").read_bytes()
print("the last 2,560,768 bytes, all the numbers, are the same in both files:",
      written[-2_560_768:] == raw[-2_560_768:])

# %% [markdown]
r"""
The file loads. Every check passes: the sizes fit, no number is infinite, all names are there. Only the answer is rubbish. **Bytes do not
know what they are.** All that makes them numbers is a word in a header, and today you read that header yourself.
"""

# %% [markdown]
r"""
## 2-1 手读 safetensors · safetensors by hand: header, offsets, dtypes, bf16

A `.safetensors` file has three parts:

1. eight bytes: the length $h$ of the header, a whole number, lowest byte first (小端, little-endian);
2. $h$ bytes of JSON text, the **header**: for every tensor (array) its `dtype`, its `shape`, and two `data_offsets`;
3. the numbers, back to back. The offsets count from *here*, from byte $8 + h$ of the file.

Here are the first eight bytes of the shipped model. Two of them are not zero. Work out $h$ by hand: the second byte counts 256 each.
"""

# %%
print("bytes:", raw[:8].hex(" "))
print("0x70 + 0x0e · 256 =", 0x70 + 0x0E * 256, "· the library says", int.from_bytes(raw[:8], "little"))
print(raw[8:230].decode(), "…")

# %% [markdown]
r"""
The first number of the embedding stands at byte $8 + 3696 + 0 = 3704$. Those two bytes, and what they are in each of the two formats:
"""

# %%
two = raw[3704:3706]
bits = int.from_bytes(two, "little")
print("bytes", two.hex(" "), "→ bits", f"{bits:016b}")
for kind in ("f16", "bf16"):
    print(f"as {kind:4}:", fmt(half_floats.half_to_f32([bits], kind)[0]))

# %% [markdown]
r"""
Seven million times apart. So what is a float made of?

### Sign, exponent, fraction

A float is a number in scientific notation, in base two: a **sign** (符号), an **exponent** (指数) that says between which two powers of
two it lies, and a **fraction** (尾数) that says where between them:

$$ x = \pm\, 2^{\,e - \text{bias}} \cdot \Big( 1 + \frac{f}{2^{m}} \Big), \qquad
\begin{array}{lccc} & \text{exponent bits} & \text{bias} & m \\ \text{f32} & 8 & 127 & 23 \\ \text{bf16} & 8 & 127 & 7 \\
\text{f16} & 5 & 15 & 10 \end{array} $$

with two exceptions: $e = 0$ has no leading 1 (zero, and the very small **subnormal** numbers, 次正规数: $\pm 2^{1 - \text{bias}} \cdot f / 2^m$),
and the largest $e$ means infinity ($f = 0$) or **NaN**, not a number ($f \ne 0$).

Try it on the two bytes above, as f16: `0 01100 1100001000` has $e = 12$ and $f = 776$, so it is $2^{12 - 15} \cdot (1 + 776/1024) = 0.2197$.

The same number in the three formats. **Predict from the formula:** in which 16-bit format is it nearer to −0.1? And for which of them is there
a one-line conversion to f32?
"""

# %%
float_bits(-0.1)

# %% [markdown]
r"""
**bf16 is the upper half of an f32.** Same sign, same exponent, the first seven bits of the fraction. So bf16 to f32 is: put 16 zero bits
behind. It covers every size that f32 covers, with two to three decimal digits. f16 has three bits more of fraction, so it is nearer here; it pays
with its exponent: above 65,504 it is infinite.

(Look closely at the last bit of bf16: it is not the f32's bit. The conversion *down* has rounded. That is section 2-3.)

### Six numbers by eye

A file with one tensor of six bf16 numbers, made by hand. Read the six from the bytes before you look at the last line: the second byte
of each pair comes first. `3f80` is 1: sign 0, exponent 127, fraction 0.
"""

# %%
six = np.array([0x3F80, 0xC000, 0x3F00, 0x4049, 0x0000, 0x47C3], np.uint16)
tiny = weight_file.put_together({"six": weight_file.Tensor("BF16", (2, 3), six.astype("<u2").tobytes())})
print("length:", tiny[:8].hex(" "), "=", int.from_bytes(tiny[:8], "little"))
print("header:", repr(tiny[8:-12].decode()))
print("data:  ", tiny[-12:].hex(" "))
print("values:", (six.astype(np.uint32) << 16).view(np.float32).reshape(2, 3).tolist())

# %% [markdown]
r"""
$\pi$ became 3.140625 and 100,000 became 99,840: three digits, as promised.

Notice the spaces at the end of the header. They make $8 + h$ a multiple of 8, so that numbers begin at an address that their size divides.
"""

# %% [markdown] course={"id": "d02.a1", "kind": "A", "role": "card"}
r"""
### Exercise 2-1 A · read a tensor

15 minutes · difficulty 2/3 · 6 points · about 20 lines

Read one tensor from a `.safetensors` file, with `open`, `struct` (or `int.from_bytes`), `json` and NumPy; no package that knows the format. Return
float32 of the tensor's shape. `dtype` may be `"F32"`, `"F16"` or `"BF16"`, all little-endian.

A name that is not there is a `KeyError`. A `ValueError` is everything that cannot be true: another dtype; a header longer than the
file; offsets that do not lie in order inside the data; a negative size, or a shape that needs
another number of bytes than the offsets give. The header may have an entry
`"__metadata__"`, which is no tensor, and tensors may stand in any order.

<details><summary>Hint 1: the two places where people slip</summary>

`data_offsets` count from byte `8 + h`. And a shape of `[]` is one number: `math.prod([])` is 1.

</details>

<details><summary>Hint 2: bf16</summary>

`np.frombuffer(data, "<u2").astype(np.uint32) << 16`, then `.view(np.float32)`: the bits stay, their meaning changes.

</details>
"""

# %% course={"id": "d02.a1", "kind": "A", "role": "answer", "points": 6, "minutes": 15, "difficulty": 2}
# EXERCISE d02.a1
def read_tensor(path, name):
    """Return a tensor of a .safetensors file as float32 of its shape.

    KeyError for an unknown name, ValueError for a header that cannot be true.
    >>> read_tensor(MODELS / "needle-qwen3" / "model.safetensors", "model.norm.weight").shape
    (160,)
    """
    raise NotImplementedError("d02.a1")


# %% course={"id": "d02.a1", "kind": "A", "role": "check"}
check("d02.a1", read_tensor)

# %% [markdown]
r"""
Yours (or ours, until yours passes) against the engine's own loader, on every tensor of the shipped model:
"""

# %%
read = solved_or(read_tensor, weight_file.read_tensor)
loader = SafetensorsFile(folder / "model.safetensors")
same = 0
for name, place in loader.tensors.items():
    theirs = loader.read(name, 0, int(np.prod(place.shape))).reshape(place.shape)
    same += np.array_equal(read(loader.path, name), theirs)
print(f"{same} of {len(loader.tensors)} tensors equal, bit for bit")

# %% [markdown]
r"""
### A header that lies

A file comes from somewhere: a download that broke, a converter with a bug, a stranger. A reader that believes the header reads beyond the data,
or reserves a terabyte because eight bytes say so. Four liars, and what the engine's loader says:
"""

# %%
header, data = weight_file.take_apart(tiny)


def lying(change, size=None):
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]} | change
    text = str({"six": entry}).replace("'", '"').encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + data


liars = {"a shape of 7 numbers": lying({"shape": [7]}), "ends behind the file": lying({"data_offsets": [0, 14]}),
         "a header of 2^60 bytes": lying({}, 2**60), "a header of 999 bytes": lying({}, 999)}
for name, content in liars.items():
    path = Path(work.name, "liar.safetensors")
    path.write_bytes(content)
    try:
        print(name, "→ accepted:", SafetensorsFile(path).tensors)
    except CourseError as error:
        ours = "header would have" in str(error)
        print(f"{name:23} → refused by", "the loader's own limit" if ours else "the check of the layout")

# %% [markdown]
r"""
All four are refused before memory is reserved or a number is read. The layout is checked by the `safetensors` package, which
knows the format best; the loader checks each entry once more, for the file may be replaced between the two looks. (The renamed dtype of the beginning is the liar that *no* reader can catch: nothing
in the file contradicts it. Against that one, only a checksum of the whole file helps. Day 25.)

**Read together:** the loader's {see course_lib/engine/safetensors_file.py SafetensorsFile._place}, which turns one entry of the header into a place. Find
what it checks, and what it deliberately leaves open: a dtype that the engine cannot read is no error *here*, only when somebody wants that tensor.
"""

# %%
print(inspect.getsource(SafetensorsFile._place))

# %% [markdown] course={"id": "d02.b1", "kind": "B", "role": "card"}
r"""
### Exercise 2-1 B · where a lie is caught

8 minutes · difficulty 2/3 · 4 points

Open [safetensors_file.py](../course_lib/engine/safetensors_file.py). The package sees most lies first (`_check_layout`). Cite the loader's own line,
or `if` with its lines, that would catch each:

* `huge_header`: a header of $2^{60}$ bytes, before anything of that size is reserved;
* `outside`: offsets that end behind the file;
* `wrong_size`: a shape that does not fit its offsets;
* `widens`: not a lie, but the line that makes f32 from bf16;
* `largest_header`: the largest header that the loader reads, in MiB (a number);
* `first_number`: the byte of the shipped file at which the last tensor, `model.norm.weight`, begins (a number; `weight_file.take_apart(raw)` gives the header as a dict).

Then say in two sentences: why is the length of the header checked twice (once against a constant, once against the file), and who sees
to it that two tensors do not overlap? (For the second, read `_check_layout`.)
"""

# %% [markdown] course={"id": "d02.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d02.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d02.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d02.b1
d02_b1 = {
    "huge_header": "",  # "path:first-last"
    "outside": "",
    "wrong_size": "",
    "widens": "",
    "largest_header": None,  # a number
    "first_number": None,
}

# %% course={"id": "d02.b1", "kind": "B", "role": "check"}
check("d02.b1", d02_b1)

# %% [markdown]
r"""
## 2-2 内存映射 · mmap, cold and hot, RSS and peak

There are two ways to get bytes of a file into a program.

* **read** copies them into memory of your own.
* **mmap** (内存映射) promises you an address range that *looks* like the file. Nothing is copied. When you touch an address for the first time, the
  processor stops, the system puts the **page** (页) of the file, usually 4,096 bytes, behind that address, and you go on. That stop is a **page fault** (缺页).

Both go through the **page cache** (页缓存): the system keeps pages of recently used files in memory that nothing else needs. A file is **hot** when its pages are there,
and **cold** when they must come from the disk.

Memory, too, has two kinds: a process's *own* pages, which nobody else can use, and *mapped* pages of files, which the system shares and may
take back at any time. Their sum is the **RSS** (常驻内存, resident set size); its largest value so far is the **peak**.

The shipped model is too small to see all this. So twelve copies of it in one file, about 31 MB:
"""

# %%
large = {f"copy{i}.{name}": tensor for i in range(12) for name, tensor in tensors.items()}
big = Path(work.name, "big.safetensors")
size = big.write_bytes(weight_file.put_together(large))
wanted = "copy7.model.layers.1.self_attn.k_proj.weight"
place = SafetensorsFile(big).tensors[wanted]
tensor_bytes = 2 * int(np.prod(place.shape))
print(f"{len(large)} tensors, {size:,} bytes; one of them: {tensor_bytes:,} bytes at {place.offset:,}")

# %% [markdown]
r"""
We want that one tensor of 40,960 bytes. Three ways, each in a fresh process, so that nothing else is counted: read the whole file; seek to
the place and read that part; map the file and touch that part. Then the same with a file that the system has been asked to forget.

**Predict:** which of the three makes the process grow by how much? And how much slower is cold?
"""

# %% tags=["nbval-ignore-output"]
part, everything = [(place.offset, tensor_bytes)], [(0, size)]
ways = {"read all": ("read", ()), "read the part": ("part", part), "map, touch the part": ("map", part),
        "map, touch all": ("map", everything)}
rows, gone = {}, True
for state in ("hot", "cold"):
    big.read_bytes()
    for name, way in ways.items():
        if state == "cold":
            gone &= page_cache.drop_from_page_cache(big)
        found = page_cache.measured(big, *way)
        rows[state, name] = found
        held = page_cache.in_page_cache(big)
        cached = "?" if held is None else f"{held / 1e6:5.1f}"
        print(f"{state:4} {name:20} own +{found['own'] / 1e6:5.1f} MB  mapped +{found['mapped'] / 1e6:5.1f} MB"
              f"  peak +{found['peak'] / 1e6:5.1f} MB  {found['ms']:7.2f} ms  then in page cache {cached} MB")
print("the system could be made to forget the file:", gone, "  (all this machine)")

# %%
hot = {name: rows["hot", name] for name in ways}
print("read all: own memory grew by the whole file:", hot["read all"]["own"] > 0.9 * size)
print("read the part: everything grew by less than a tenth:",
      hot["read the part"]["own"] + hot["read the part"]["mapped"] < 0.1 * size)
print("map, touch the part: everything grew by less than a tenth:",
      hot["map, touch the part"]["own"] + hot["map, touch the part"]["mapped"] < 0.1 * size)
print("map, touch all: mapped grew by the whole file:", hot["map, touch all"]["mapped"] > 0.9 * size,
      "· own memory did not:", hot["map, touch all"]["own"] < 0.1 * size)

# %% [markdown]
r"""
What to see in the table (your numbers, on your machine):

* **Mapping 31 MB costs nothing; touching costs.** The whole file looks readable at once, but the process grows by what it touches.
* **Touching costs more than you touch.** One byte brings at least one page, and Linux maps a group of sixteen around it. If the file lies in
  the page cache in larger pieces, it maps those, up to 2 MB. That is why *hot* may grow more than *cold*.
* **Cold is another world.** A part of a cold file waits for the disk. Look also at the last column after a cold touch of a mapped part: the system may have
  read far more than was asked for. It guesses that you will go on (**readahead**, 预读).
* **Own or mapped, it counts in the RSS**, but when memory is short, mapped pages can simply be dropped. Own pages must first be written to disk (swap), if there is room.

How these figures are read, in a few lines each: {see course_lib/lab/page_cache.py memory_now}, {see course_lib/lab/page_cache.py in_page_cache}, and what each
fresh process does: {see course_lib/lab/page_cache.py touch}.

If the line says that the file could not be forgotten, your folder for temporary files lies in memory itself (tmpfs), and "cold" is as hot as "hot". No table
of load times is worth reading without that line.
"""

# %% [markdown] course={"id": "d02.a2", "kind": "A", "role": "card"}
r"""
### Exercise 2-2 A · how much will be resident?

12 minutes · difficulty 2/3 · 5 points · about 12 lines

A file of `size` bytes is mapped; nothing of it has been touched. Then the bytes of `accesses` are read, pairs `(offset, length)`. Estimate how many bytes of the file
are then in memory:

* memory comes in whole pages of `page` bytes, the last page of the file too, even if the file ends inside it;
* the first touch of a page brings its whole group: `around` pages, and groups begin at multiples of `around` pages. The last group ends with the last page of
  the file;
* what is there already does not come again. A length of 0 touches nothing.

`ValueError` for an access that is not inside the file or has a negative length, and for `page` or `around` below 1.

<details><summary>Hint</summary>

Collect the numbers of the touched groups in a set: from `offset // page // around` to the same for the last byte, `offset + length - 1`. Then count each group's
pages.

</details>
"""

# %% course={"id": "d02.a2", "kind": "A", "role": "answer", "points": 5, "minutes": 12, "difficulty": 2}
# EXERCISE d02.a2
def resident_bytes(size, accesses, page=4096, around=16):
    """Return the estimated resident bytes of a mapped file after some reads.

    >>> resident_bytes(1_000_000, [(70_000, 1)])
    65536
    >>> resident_bytes(70_000, [(69_999, 1)])
    8192
    """
    raise NotImplementedError("d02.a2")


# %% course={"id": "d02.a2", "kind": "A", "role": "check"}
check("d02.a2", resident_bytes)

# %% [markdown]
r"""
The estimate against the system's figures, for three ways to use the file: one tensor, the same tensor of all twelve copies, and the whole file.
"""

# %% tags=["nbval-ignore-output"]
estimate = solved_or(resident_bytes, page_cache.resident_bytes)
big_file = SafetensorsFile(big)
twelve = [(big_file.tensors[wanted.replace("copy7", f"copy{i}")].offset, tensor_bytes) for i in range(12)]
books = {}
for name, accesses in (("one tensor", part), ("twelve tensors", twelve), ("all", everything)):
    page_cache.drop_from_page_cache(big)
    needed = estimate(size, accesses, page_cache.PAGE, 1)
    books[name] = needed, page_cache.measured(big, "map", accesses)["mapped"]
    print(f"{name:15} pages touched {needed:11,d}  estimate in groups of 16 {estimate(size, accesses, page_cache.PAGE):11,d}"
          f"  measured {books[name][1]:11,d}   (this machine)")

# %%
print("never less than the touched pages:", all(got >= 0.9 * need for need, got in books.values()))
print("never more than the file and one large page:",
      all(got <= size + 2**21 for _, got in books.values()))

# %% [markdown]
r"""
Where the file comes fresh from the disk in single pages, the estimate can be right to the byte. Where larger pieces of it lie in the page cache, the system maps
those, and more is resident; never less than what was touched. So treat it as any model of a machine: know what it leaves out, and in which direction it errs.

### The other half: the copy that you make

A 16-bit weight is not what the processor computes with; the engine makes f32 of it. That copy is memory of your own, however cleverly the file was opened. Two ways
to convert all tensors of the big file, and the peak of what Python and NumPy allocated (`tracemalloc` keeps that count):
"""

# %%
def whole_file():
    content = weight_file.tensors_of(big.read_bytes())
    return [np.frombuffer(t.data, np.float16).astype(np.float32) for t in content.values()]


def in_pieces():
    return [big_file.read(name, 0, int(np.prod(p.shape))) for name, p in big_file.tensors.items()]


for convert in (whole_file, in_pieces):
    tracemalloc.start()
    kept = sum(array.nbytes for array in convert())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{convert.__name__:10} result {kept / size:.1f} × the file, peak {peak / size:.1f} ×   (this machine)")

# %% [markdown]
r"""
Twice the file is needed: four bytes instead of two. The careless way holds the file's bytes and the result together. The loader takes a quarter of a million
numbers at a time and needs nothing to speak of besides its result. For a file of 2.5 GB that is 7.5 GB or 5: on a board with 8 GB, two worlds.

So why does this loader not map? Because of the following. A program maps a file; meanwhile another one, a download perhaps, cuts it short:
"""

# %%
victim = Path(work.name, "victim.bin")
victim.write_bytes(bytes(1 << 16))
script = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.truncate(0)
    try:
        print(mapped[40000])
    except BaseException as error:
        print("caught", error)
"""
done = subprocess.run([sys.executable, "-c", script, str(victim)], capture_output=True, text=True)
print("the program printed:", repr(done.stdout), "· ended by SIGBUS:", done.returncode == -signal.SIGBUS)

# %% [markdown]
r"""
No exception, no message, no `except` that could catch it: the address is there, the page is not, and the system ends the process. A plain `read` would simply have come
back with fewer bytes. So the engine *reads* files that come from elsewhere, and *maps* only the files that it has written itself (its packed weights, day 4), in
{see course_lib/engine/cache_file.py map_all}.
"""

# %% [markdown] course={"id": "d02.b2", "kind": "B", "role": "card"}
r"""
### Exercise 2-2 B · which lines touch pages

8 minutes · difficulty 3/3 · 4 points

Open [safetensors_file.py](../course_lib/engine/safetensors_file.py) and [cache_file.py](../course_lib/engine/cache_file.py).

* `reserves`: the line in `SafetensorsFile.read` that asks for the memory of the result. (It touches none of it yet.)
* `reads`: the line in `_fill` that copies bytes from the page cache;
* `first_touch`: the line in `read` that writes the result for an F16 tensor, so that its pages really come;
* `maps`: the line in `cache_file.py` that maps a file;
* `asks_ahead`: the line there that tells the system to read ahead;
* `scratch`: how many bytes of scratch memory (`raw`) does `read` need for an F16 tensor of ten million numbers (a number)?

Then say in two or three sentences: the result of `np.empty` is reserved at once but comes page by page; when during loading does the RSS grow, and why
is the peak of `in_pieces` so near to its result?
"""

# %% [markdown] course={"id": "d02.b2", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 3}
r"""
<!-- ANSWER d02.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d02.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d02.b2
d02_b2 = {
    "reserves": "",  # "path:first-last"
    "reads": "",
    "first_touch": "",
    "maps": "",
    "asks_ahead": "",
    "scratch": None,  # a number
}

# %% course={"id": "d02.b2", "kind": "B", "role": "check"}
check("d02.b2", d02_b2)

# %% [markdown]
r"""
## 2-3 转换器也要测 · A converter is under test too: determinism, f16 edge cases

Between a trained model and an engine stands a **converter** (转换器): it renames, reorders and rounds millions of numbers, once, and nobody looks at the
result. You have seen in day 1 what "the model answers" proves. What should a converter be tested for?

### Twice the same

First: the same input must give the same file, byte for byte. Otherwise no checksum (a short number computed from all bytes, such as SHA-256) means anything, and nobody can tell an update from an accident. Here is a converter with an
innocent flaw: it keeps the names of its tensors in a Python `set`. We ask for that order in two processes:
"""

# %%
names = list(tensors)
script = "import sys; print(*set(sys.argv[1:]))"
orders = [subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True,
                         env={**os.environ, "PYTHONHASHSEED": seed}).stdout.split()
          for seed in ("1", "2")]
files = [weight_file.put_together({name: tensors[name] for name in order}) for order in orders]
digests = [hashlib.sha256(file).hexdigest() for file in files]
print("the same set of names:", set(orders[0]) == set(orders[1]), "· in the same order:", orders[0] == orders[1])
print("files of the same length:", len(files[0]) == len(files[1]), "· same SHA-256:", digests[0] == digests[1])
print("same tensors in both:", weight_file.tensors_of(files[0]) == weight_file.tensors_of(files[1]))
ordered = [weight_file.put_together({name: tensors[name] for name in sorted(order)}) for order in orders]
print("after sorting the names, same SHA-256:", len({hashlib.sha256(f).digest() for f in ordered}) == 1)

# %% [markdown]
r"""
Python gives every process another order of a set of texts (a defence against attacks; we fixed the seed only to be sure of two different ones). Both files are *right*: each tensor can be
read, each value is the same. They are still two files, not even of one length: in another order other offsets are written, some with a digit more. In one process, a test "convert twice and compare" would have passed. **Run it in two processes.** The same trap: a time stamp in
the metadata, the order of files in a folder, the number of threads.

### Edges of f16

Second: the values. Four kinds of numbers make trouble: too large, too small, exactly halfway, and not a number. Fill in the third column before you run the cell; f16 has 10 bits of fraction, its largest number is 65,504 and its smallest
$2^{-24}$.

| f32 | what it tests | f16? |
|---|---|---|
| 65504 | the largest f16 | |
| 65519 | just above, nearer to 65504 than to the next step | |
| 65520 | halfway to that next step, which does not exist | |
| $2^{-24}$ | the smallest f16 | |
| $2^{-25}$ | half of it, exactly halfway to 0 | |
| $1.001 \cdot 2^{-25}$ | a little more than half of it | |
| 2049 | between 2048 and 2050, which are neighbours | |
| 2051 | between 2050 and 2052 | |
"""

# %%
edges = np.float32([65504, 65519, 65520, 2**-24, 2**-25, 1.001 * 2**-25, 2049, 2051])
half, lost = half_floats.f32_to_half(edges, "f16")
for value, bits in zip(edges, half, strict=True):
    print(f"{value:>12.6g} → bits {bits:04x} = {half_floats.half_to_f32([bits], 'f16')[0]:.6g}")
print("finite numbers lost:", lost)

# %% [markdown]
r"""
**Ties go to the even one** (半数取偶): exactly halfway, the neighbour whose last bit is 0 wins. So 2049 goes down and 2051 goes up, 65520 goes up to a number that does not fit (infinity),
and $2^{-25}$ goes down to 0. Over many numbers, ups and downs cancel. Whoever always rounds ties up, or just cuts bits off, moves the whole model in one direction.

### f16 to bf16: one weight in eight is a tie

The shipped weights are f16: 10 bits of fraction. bf16 has 7. So 3 bits must go, and they are eighths of a step: 0/8 … 7/8. Three converters, each one line long; `u` are the bits
of the f32:

* cut off: `u >> 16`
* add half, ties away from zero: `(u + 0x8000) >> 16`
* ties to even: `(u + 0x7FFF + ((u >> 16) & 1)) >> 16`

**Predict** the mean error of each, in steps of bf16, counting towards zero as negative. (If all eight endings are equally frequent, it is an average of eight fractions.)
"""

# %%
weights = np.concatenate([np.frombuffer(t.data, np.float16).astype(np.float32) for t in tensors.values()])
u = weights.view(np.uint32)
one = np.uint32(1)
rules = {"cut off": u >> 16, "half away": (u + np.uint32(0x8000)) >> 16,
         "half even": (u + np.uint32(0x7FFF) + (u >> 16 & one)) >> 16}
size_of = np.abs(weights.astype(np.float64))
some = size_of > 0
step = 2.0 ** (np.floor(np.log2(size_of[some])) - 7)
print(f"weights: {weights.size:,}; exactly between two bf16 numbers: {percent((u & 0xFFFF == 0x8000).mean())}")
for name, bits in rules.items():
    error = (np.abs((bits << 16).view(np.float32).astype(np.float64)) - size_of)[some] / step
    print(f"{name:9}: mean error {error.mean():7.4f} steps, mean size {np.abs(error).mean():.4f}   (this machine)")
print("derived  : cut off", -sum(range(8)) / 64, "· half away", (-1 - 2 - 3 + 4 + 3 + 2 + 1) / 64, "· half even 0")

# %% [markdown]
r"""
Arithmetic and measurement agree to the third digit. Cutting off makes weights smaller, by 7/16 of a step on average. Ties away from zero look harmless in a test with random f32 numbers, because there ties
hardly ever happen; on f16 weights every eighth number is one, and the bias is there. **Test a converter on the numbers that it will meet.**

Would the model have told us?
"""

# %%
right = engine.prefill(prompt.ids)
for name, bits in rules.items():
    ends = np.cumsum([0] + [len(t.data) // 2 for t in tensors.values()])
    made = {key: weight_file.Tensor("BF16", t.shape, bits[a:b].astype("<u2").tobytes())
            for (key, t), a, b in zip(tensors.items(), ends, ends[1:], strict=False)}
    other = Engine.load(weight_file.folder_with(folder, Path(work.name, "bf16"), made))
    session = other.prefill(prompt.ids)
    text = other.decode(generate_from(session, 12).ids)
    moved = float(np.abs(session.logits - right.logits).max())
    print(f"{name:9}: answer right: {'ramen' in text} · largest change of a logit {moved:.2f}   (this machine)")

# %% [markdown]
r"""
No. All three answer. The one that cuts off moves the scores about twice as far as the honest one, in a model of three layers; nobody would see it in a text.

### One more: not a number

A model file should hold no NaN, but if it does, the converter must not hide it. The two adding converters do. The bits of one NaN, before and after:
"""

# %%
nan = np.array([0x7FFFFFFF], np.uint32)
for name, bits in (("half away", (nan + np.uint32(0x8000)) >> 16),
                   ("half even", (nan + np.uint32(0x7FFF) + (nan >> 16 & one)) >> 16)):
    value = (bits.astype(np.uint32) << 16).view(np.float32)[0]
    print(f"{name}: {nan.view(np.float32)[0]} 7fffffff → {int(bits[0]):04x}0000 = {value}")

# %% [markdown]
r"""
The addition ran over into the sign: not a number has become *minus zero*, the most harmless number there is. A damaged tensor would pass every check for NaN behind this converter. And how many of the shipped weights are
subnormal in f16, the ones that a fast but careless conversion sets to 0?
"""

# %%
small = (np.abs(weights) < 2.0**-14) & (weights != 0)
print(f"{int(small.sum())} of {weights.size:,} weights are subnormal in f16, {int((weights == 0).sum())} are 0")

# %% [markdown] course={"id": "d02.a3", "kind": "A", "role": "card"}
r"""
### Exercise 2-3 A · a converter that reports

15 minutes · difficulty 3/3 · 6 points · about 15 lines

Convert a float32 array to `"f16"` or `"bf16"`: return the bits, a uint16 array of the same shape, and a report.

* To the nearest number, ties to even; subnormal numbers included; too large becomes infinite. Signs stay, that of zero too.
* Every NaN becomes the *one* quiet NaN: `0x7E00` in f16, `0x7FC0` in bf16. (NaNs differ in bits that nobody reads, but a checksum does.)
* The report counts what was lost: `"overflow"`, finite numbers that became infinite; `"underflow"`, numbers other than 0 that became 0.
* Another kind is a `ValueError`. The argument is not changed.

For f16 you may use NumPy's own `astype(np.float16)`. For bf16 there is none.

<details><summary>Hint 1: FloatingPointError</summary>

While an answer is checked, an overflow in NumPy raises an error. Here it is meant: `with np.errstate(over="ignore"): …`

</details>

<details><summary>Hint 2: comparing sizes</summary>

`bits & 0x7FFFFFFF` are the bits without sign, and as whole numbers they are ordered like the sizes: above `0x7F800000` is NaN, equal to it is infinity.

</details>
"""

# %% course={"id": "d02.a3", "kind": "A", "role": "answer", "points": 6, "minutes": 15, "difficulty": 3}
# EXERCISE d02.a3
def f32_to_half(x, kind):
    """Return (bits uint16 of x's shape, {"overflow": count, "underflow": count}).

    x: float32 array; kind: "f16" or "bf16".
    >>> f32_to_half(np.float32([1.0, 1e6]), "f16")
    (array([15360, 31744], dtype=uint16), {'overflow': 1, 'underflow': 0})
    """
    raise NotImplementedError("d02.a3")


# %% course={"id": "d02.a3", "kind": "A", "role": "check"}
check("d02.a3", f32_to_half)

# %% [markdown]
r"""
A 16-bit format has only 65,536 numbers. So do not sample: **try all of them.** Each one made f32 and back must be itself.
"""

# %%
to_half = solved_or(f32_to_half, half_floats.f32_to_half)
every = np.arange(65536, dtype=np.uint16)
for kind in ("f16", "bf16"):
    values = half_floats.half_to_f32(every, kind)
    back, report = to_half(values, kind)
    numbers = ~np.isnan(values)
    print(f"{kind:4}: {int((back == every)[numbers].sum())} of {int(numbers.sum())} numbers come back, "
          f"{len(set(back[~numbers].tolist()))} NaN for {int((~numbers).sum())}, lost {report}")
packed, report = to_half(weights, "f16")
print("the shipped file, f16 → f32 → f16, equal:",
      packed.tobytes() == b"".join(t.data for t in tensors.values()), "· lost", report)

# %% [markdown]
r"""
### Read together: the same rounding in C

When the engine packs weights into blocks (day 4), each block gets a scale in f16. Many small processors have no instruction for that, so the kernels do it by hand, in {see kernels_pyx/c/pack.c "float16 of |f| < 65520" "(bits - 0x38000000) >> 13"}:
"""

# %%
print(c_function("pack.c", "half_of"))

# %% [markdown]
r"""
`MAGNITUDE_MASK` is `0x7fffffff`: all but the sign. `0x38000000` moves the exponent's bias from 127 to 15; `0x3f000000` are the bits of 0.5. Two tricks. For normal numbers: 13 bits must go, so it adds a little less than half of the last kept bit, and one more if that bit is odd; if the fraction runs over, the exponent grows by one all by itself. For
subnormal ones, it lets the processor round: next to 0.5, a float32 has its last bit exactly at $2^{-24}$, the step of f16's smallest numbers. (It does not care about infinity; its caller refuses what is too large.)
"""

# %% [markdown] course={"id": "d02.b3", "kind": "B", "role": "card"}
r"""
### Exercise 2-3 B · the line that decides

8 minutes · difficulty 2/3 · 5 points

Open [pack.c](../kernels_pyx/c/pack.c), [weight_blocks.py](../course_lib/weight_blocks.py) and [half_floats.py](../course_lib/half_floats.py).

* `normal`: the line in `pack.c` that decides how a normal number is rounded;
* `subnormal`: the line in `pack.c` that rounds a subnormal one;
* `in_python`: the line in `weight_blocks.py` in which NumPy makes the scales f16;
* `bf16`: the line in `half_floats.py` that rounds to bf16;
* `nan`: the line in `half_floats.py` that sees to NaN;
* `first_infinite`: the smallest positive f32 that f16 turns into infinity (a number);
* `tie`: the bf16 bits of the f32 with bits `0x3F818000`, as a decimal number.

Then explain in two or three sentences why `0xfff` plus the last kept bit is "half, ties to even": what happens to a remainder just below half, exactly half, just above?
"""

# %% [markdown] course={"id": "d02.b3", "kind": "B", "role": "answer", "points": 5, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d02.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d02.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d02.b3
d02_b3 = {
    "normal": "",  # "path:first-last"
    "subnormal": "",
    "in_python": "",
    "bf16": "",
    "nan": "",
    "first_infinite": None,  # a number
    "tie": None,
}

# %% course={"id": "d02.b3", "kind": "B", "role": "check"}
check("d02.b3", d02_b3)

# %% [markdown]
r"""
## Summary

1. A weight file is a length, a table in JSON and bytes; the bytes mean what the table says, so a reader checks every number of it before it believes one.
2. Mapping is free and touching is not: memory comes in pages and groups of pages, and the f32 copy that you make is yours alone.
3. A converter is tested for the same bytes in two processes, for ties, the largest, the smallest and NaN, and on all 65,536 numbers, because the model's answers do not tell.

The formula: $\text{bf16} = (u + \texttt{0x7FFF} + \text{last kept bit}) \gg 16$ · The number: **one in eight**, the share of shipped weights that lie exactly between
two bf16 numbers.

**What to read next**: day 3 turns text into the numbers that this model eats. Then day 4 makes the file smaller, and you will meet ties again.
"""

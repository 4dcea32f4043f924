# %% [markdown]
r"""
# Day 5/30 · 点积与对拍 Dot products and differential testing

**You need** Python, NumPy, the dot product. Day 4 helps; what it gave you is recapped in six numbers.

**You will be able to** multiply a weight matrix with integers only · read four lines of ARM code and
say what each instruction does · find one wrong line among 35 stages of a model by changing one
variable at a time (对拍只改一个变量), and say why no other way could have found it.

**Time** 90 minutes: about 35 to read and run, 55 for the six exercises. The name and the rule of 5-3 are the series' own; 5-1 and 5-2 are
this course's.

Numbers about speed and size carry a label: **this machine** (measured in the cell you run) ·
**derived** (arithmetic) · **recorded** (counted once, its command is shown). Words that you miss are in
the [glossary](../docs/glossary.md).
"""

# %% tags=["nbval-ignore-output"]
import inspect
import os
import time

for name in ("COURSE_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # so that times compare
    os.environ.setdefault(name, "1")

import numpy as np

import kernels_pyx
from course_lib import backend, weight_blocks
from course_lib.classroom import check, solved_or
from course_lib.engine import Engine
from course_lib.lab import builds, differential, dot_ladder
from course_lib.lab.needle import NeedleOptions, prompt_of
from course_lib.lab.stages import run_stages
from course_lib.linear import PackedMatrix, linear
from course_lib.paths import MODELS
from course_lib.show.c_source import c_function
from course_lib.show.sdot_picture import sdot_lanes
from course_lib.show.stages_picture import stage_differences
from course_lib.show.steps_picture import block_steps
from course_lib.show.text import fmt, percent

print("backend:", backend.info().name, backend.info().variant, "·", backend.info().reason)

# %% [markdown]
r"""
## Nearly all of it is one operation

A model is a chain of matrices. To write one token it takes a row of numbers $x$ and multiplies it
with one matrix after the other; every output is a **dot product** (点积) of $x$ with one row of
**weights** (权重). Weights are fixed; they come from the file. The rows $x$ that flow through the
chain are made anew for every token and are called **activations** (激活).

How much of it is there? The shipped model has three layers of four matrices each (what each is for,
days 6 and 7 tell; today their sizes are enough). One token:
"""

# %%
engine = Engine.load(MODELS / "needle-qwen3")
layers = engine.model.weights.layers
matrices = {"q, k and v": layers[0].qkv_proj, "attention out": layers[0].o_proj,
            "gate and up": layers[0].mlp.gate_up_proj, "mlp out": layers[0].mlp.down_proj}
in_layers = 0
for name, w in matrices.items():
    print(f"{name:14s} {w.shape[0]:4d} dot products of {w.shape[1]} numbers: {w.size:7,d}")
    in_layers += len(layers) * w.size
output = engine.model.weights.output
total = in_layers + output.size
print(f"{len(layers)} layers and the output matrix {output.shape}: {total:,d} multiply-adds a token")

# %% [markdown]
r"""
A million multiply-adds a token; an 8B model needs six thousand times as many. So it matters how a
machine does *one*.

The cheapest numbers are small integers. Day 4 stored weights as int8. Let us do the obvious: multiply
int8 with int8, and let NumPy add up. Ten numbers, by two ways:
"""

# %%
a = np.array([100, 90, -80, 70, 60, 127, -120, 110, 100, 91], np.int8)
print("NumPy, int8: ", np.dot(a, a), np.dot(a, a).dtype)
print("Python:      ", sum(int(v) * int(v) for v in a))

# %% [markdown]
r"""
A sum of squares that is **negative**. No warning. An int8 has room for −128 … 127, and NumPy keeps the
result in the type of the inputs: what does not fit wraps around. (Python's own numbers have no
limit, which is one reason why they are slow.)

Today is about doing this right, then doing it fast, and then about proving that fast is still right.
The last part is the hardest. At the end you meet two builds (构建) of this engine that answer every
question alike. One of them has exactly this kind of bug.

### Recap: a block of weights

Day 4 in six numbers. A row of weights is cut into blocks (块) of 32; here, of three. A block stores
whole numbers, the **codes**, and one scale: value = code · scale. A code of 1 is worth one **step**
(步长).
"""

# %%
w_codes = np.array([[1, 2, -1], [3, 0, -2]])
w_scales = np.array([0.5, 0.25])
w = w_codes * w_scales[:, None]
print("codes ", w_codes.tolist(), " scales", w_scales.tolist())
print("values", w.tolist())
print("real block, Q8_0: 32 codes of one byte and a float16 scale =",
      weight_blocks.BLOCK_BYTES["q8_0"], "bytes")

# %% [markdown]
r"""
## 5-1 激活量化 Quantizing activations

The weights are integers now, the activations are still floats. Then every multiplication has to turn a
code into a float first. If $x$ were integers too, the whole inner loop could be integer arithmetic.

So quantize $x$ as well, on the fly, per 32 values. (Here per three.) For each block:

1. $m$ = the largest magnitude,
2. scale $= m/127$,
3. code $= x \cdot (127/m)$, rounded to the nearest whole number; a tie goes to the **even** neighbour.

Do the first block by hand before you run the cell: $m = 2$, $127/m = 63.5$.
"""

# %%
x = np.array([[2, -1, 0.5], [0.1, -0.05, 0.02]])
m = np.abs(x).max(axis=1, keepdims=True)
x_scales = (m / 127)[:, 0]
x_codes = np.rint(x * (127 / m)).astype(int)
print("codes ", x_codes.tolist())
print("back  ", (x_codes * x_scales[:, None]).round(4).tolist(), " was", x.tolist())

# %% [markdown]
r"""
Both ties, −63.5 twice, went to −64, the even one. And look at the second block: its numbers are twenty
times smaller and just as well resolved. It has its own scale.

Now the dot product. In a block, **both** scales are the same for all products, so they leave the sum:

$$ y = \sum_b \underbrace{s^w_b \, s^x_b}_{\text{one multiplication}}
\underbrace{\sum_{i \in b} w_i \, x_i}_{\text{whole numbers only}} $$

where $w_i$ and $x_i$ are codes now. Multiply the codes in your head, then compare:
"""

# %%
whole = (w_codes * x_codes).sum(axis=1)
print("integer dots:", whole.tolist())
print("with scales: ", [fmt(v) for v in w_scales * x_scales * whole],
      "→", fmt((w_scales * x_scales * whole).sum()))
print("in floats:   ", fmt((w * x).sum()))
bound = (x_scales / 2 * np.abs(w).sum(axis=1)).sum()
print("error", fmt((w_scales * x_scales * whole).sum() - (w * x).sum()), " bound", fmt(bound))

# %% [markdown]
r"""
127 − 128 − 32 = −33 and 381 − 50 = 331. Only two floating point multiplications and one addition were
left to do.

The bound in the last line is worth a minute. Each $x_i$ is off by at most half a step, so $y$ is off
by at most $\sum_b \tfrac{s^x_b}{2} \sum_{i \in b} |w_i|$, with $w_i$ the weight's value. **You can know
the largest possible error before you measure any.** In 5-3 this becomes a gate.

### Why 32 and not the whole row?

One scale for a whole row of activations would be simpler. Here is a real row: it goes into the last
matrix of layer 2, 448 numbers, made while the model reads a prompt.

**Predict**: with one scale for all 448, how many of them fall below half a step and become 0? And with
one scale per 32?
"""

# %%
prompt = prompt_of(engine, NeedleOptions(tokens=128), 1)
begun = engine.encode(prompt.fact.sentence, allow_special=False)[:-2]
ids = list(prompt.ids) + list(begun)
print("the prompt ends:", repr(engine.decode(ids)[-76:]))
stages = dict(run_stages(engine.model, ids))  # every row on the way, by name (more in 5-3)
inner = stages["layer 2 inner"][60]
half_step = np.abs(inner).max() / 254, np.repeat(np.abs(inner).reshape(-1, 32).max(axis=1) / 254, 32)
print("become 0 with one scale:", int((np.abs(inner) < half_step[0]).sum()),
      "· with one per 32:", int((np.abs(inner) < half_step[1]).sum()), "· of", inner.size)
block_steps(inner, label="this machine: activations of layer 2 before 'mlp out', token 60")

# %% [markdown]
r"""
Each dot is one value; note the logarithmic scale. The dashed line is half of the one big step: every
dot below it would become 0, 285 of 448. The short bars are half steps of the blocks. They follow the
data, and 147 vanish.

One row proves little. Take all 133 rows that enter each matrix, in all layers: how wrong does the
product become, on average, if you round the weights, the activations, or both? (`w8(rows, w)` is the
product with `w` rounded to Q8_0.)
"""

# %% tags=["nbval-ignore-output"]
def rounded(rows, size):
    groups = rows.reshape(len(rows), -1, size)
    top = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), np.float32(1e-6))
    return (np.rint(groups * (127 / top)) * (top / 127)).reshape(rows.shape)


feeds = {"q, k and v": "norm", "attention out": "context", "gate and up": "mlp norm",
         "mlp out": "inner"}
errors = {}
print("mean |error| in % of mean |output|, all layers   (this machine)")
print(f"{'':14}{'weights':>9}{'activations':>13}{'both':>7}{'√(w²+a²)':>10}{'one scale a row':>17}")
for name in matrices:
    found = []
    for n, layer in enumerate(layers):
        w = (layer.qkv_proj, layer.o_proj, layer.mlp.gate_up_proj,
             layer.mlp.down_proj)[list(matrices).index(name)]
        rows, w8 = stages[f"layer {n} {feeds[name]}"], builds.Build("q8 weights")
        y, size = rows @ w.T, np.abs(rows @ w.T).mean()
        ways = (w8(rows, w), rounded(rows, 32) @ w.T, w8(rounded(rows, 32), w),
                rounded(rows, rows.shape[1]) @ w.T)
        found.append([np.abs(out - y).mean() / size for out in ways])
    e = errors[name] = 100 * np.mean(found, axis=0)
    print(f"{name:14}{e[0]:9.2f}{e[1]:13.2f}{e[2]:7.2f}{np.hypot(e[0], e[1]):10.2f}{e[3]:17.2f}")

# %%
for name, (of_w, of_x, both, whole_row) in errors.items():
    print(f"{name:14} activations cost 0.9 to 2 times the weights: {0.9 < of_x / of_w < 2}   "
          f"both = √(w²+a²) to 3 %: {abs(both / np.hypot(of_w, of_x) - 1) < 0.03}   "
          f"one scale a row costs {whole_row / of_x:.1f} ×")

# %% [markdown]
r"""
Three things to take away:

* Rounding the activations costs **about as much** as rounding the weights did, in "mlp out" twice as much.
* Both together cost the root of the sum of squares: the two errors do not know of each other.
* In the first three matrices one scale a row costs 1.3 to 1.5 times the error; in "mlp out" three times:
  its inputs are products of two factors, and a few of them are huge. **One outlier spoils the step of everything
  that shares its scale**; 32 is how far you let it reach.
"""

# %% [markdown] course={"id": "d05.a1", "kind": "A", "role": "card"}
r"""
### Exercise 5-1 A · an integer dot product, bit for bit

10 minutes · difficulty 2/3 · 5 points · about 8 lines

One output: `x_codes`, `w_codes` int8 `[n]` (a multiple of 32), `x_scales` float32 `[n/32]`, `w_scales`
float16 `[n/32]`. Return one `np.float32`, with the bits of the compiled kernels. Per block, in order:

1. the sum of 32 products of codes, a whole number, exact;
2. the product of the two scales as float32, rounded once;
3. `acc = scale · sum + acc`, computed exactly and rounded **once**. Processors have an instruction for
   this, the **fused multiply-add** (融合乘加).

How do you round once in NumPy? A float64 holds the product `scale · sum` without any rounding: 24 bits
times 20 bits are 44, and it has 53. Add in float64, then go to float32 at the end of every block. (The
float64 addition may round too. That shows only where it lands exactly between two float32, and no
case here does; [fused.py](../course_lib/fused.py) closes that gap as well.)

<details><summary>Hint 1: int8 again</summary>

`x_codes.astype(np.int64)` before you multiply.

</details>

<details><summary>Hint 2: which operations are float32?</summary>

`np.float32(w_scales[b]) * x_scales[b]` is a float32 product. `float(scale) * int(total) + float(acc)` is
Python's float, which is float64. `np.float32(…)` rounds.

</details>
"""

# %% course={"id": "d05.a1", "kind": "A", "role": "answer", "points": 5, "minutes": 10, "difficulty": 2}
# EXERCISE d05.a1
def q8_dot(x_codes, x_scales, w_codes, w_scales):
    """One output of an int8 product: a float32 with the kernels' bits.

    x_codes, w_codes: int8 [n], n a multiple of 32; x_scales: float32 [n/32]; w_scales: float16
    [n/32]. Blocks in ascending order, one rounding for the product of the scales and one for
    scale * sum + acc.
    >>> one = np.ones(32, np.int8)
    >>> q8_dot(one, np.array([0.5], np.float32), 3 * one, np.array([0.25], np.float16))
    np.float32(12.0)
    """
    raise NotImplementedError("d05.a1")


# %% course={"id": "d05.a1", "kind": "A", "role": "check"}
check("d05.a1", q8_dot)

# %% [markdown]
r"""
Your function (ours, until it passes) against the engine's own product, {see course_lib/linear.py linear}, on a
real matrix: the first 100 outputs of "gate and up" in layer 0, last token. (`PackedMatrix` holds Q8_0 blocks in the
order in which the kernels read them.)
"""

# %%
dot = solved_or(q8_dot, dot_ladder.q8_dot)
w = layers[0].mlp.gate_up_proj
row = stages["layer 0 mlp norm"][-1:]
packed = PackedMatrix.quantize(w)
codes, scales = weight_blocks.quantize_activations(row)
w_scale, w_code = weight_blocks.split_blocks(packed.to_blocks(), "q8_0")
w_code = w_code.view(np.int8).reshape(w.shape)
by_hand = np.array([dot(codes[0], scales[0], w_code[r], w_scale[r]) for r in range(100)], np.float32)
wanted = linear(row, packed)[0, :100]
print("outputs with equal bits:", int((by_hand.view(np.int32) == wanted.view(np.int32)).sum()), "of 100")

# %% [markdown]
r"""
### What does the rounding of x cost?

Somebody has to find the maximum of every block and round every number of x, for each token and each
matrix. Does that eat the gain?
"""

# %%
for name, w_any in matrices.items():
    outputs, inputs = w_any.shape
    print(f"{name:14s} {inputs} values quantized once, {w_any.size:7,d} multiply-adds: "
          f"{percent(inputs / w_any.size)}   (derived)")

# %% [markdown] course={"id": "d05.b1", "kind": "B", "role": "card"}
r"""
### Exercise 5-1 B · O(n) beside O(n·m)

8 minutes · difficulty 2/3 · 4 points

Open [weight_blocks.py](../course_lib/weight_blocks.py) and
[linear_blocks.c](../kernels_pyx/c/linear_blocks.c).

* `rounds_numpy`: the line where NumPy rounds activations to codes, ties to even.
* `rounds_c`: the two lines where the C kernel does it. (There is no rounding function: an addition
  rounds.)
* `quantized_once`: in C, the line that hands out the quantizing of x, in pieces, before any row of the
  weights is touched.
* `products_per_value`: how many multiply-adds one quantized activation serves in "gate and up".

Then say in your words why the cost of quantizing x does not matter for a matrix, and name a case in which
it would.
"""

# %% [markdown] course={"id": "d05.b1", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d05.b1 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d05.b1", "kind": "B", "role": "evidence"}
# EVIDENCE d05.b1
d05_b1 = {
    "rounds_numpy": "",  # "path:first-last"
    "rounds_c": "",
    "quantized_once": "",
    "products_per_value": None,  # a number
}

# %% course={"id": "d05.b1", "kind": "B", "role": "check"}
check("d05.b1", d05_b1)

# %% [markdown]
r"""
## 5-2 SDOT 做什么 What SDOT does, from Python to NEON in five steps

The same product, five ways. We use the real matrix from above, 896 rows of 160 codes, and count two
things per row: **instructions**, the single steps of a processor, and **bytes** moved between it and
memory.

**Step 1, a Python loop.** It says exactly what happens, one number at a time.
"""

# %%
print(inspect.getsource(dot_ladder.python_product))

# %% [markdown]
r"""
**Step 2, NumPy.** The loop moves into compiled code. The price: whole arrays of intermediate results,
here four bytes for every product, are written to memory and read back.
"""

# %%
print(inspect.getsource(dot_ladder.numpy_product))
rungs = {"Python": dot_ladder.python_product(codes[0].tolist(), scales[0].tolist(),
                                             w_code.tolist(), w_scale.tolist()),
         "NumPy": dot_ladder.numpy_product(codes[0], scales[0], w_code, w_scale)}
for name, out in rungs.items():
    print(f"{name} agrees with the kernel to 6 digits:",
          bool(np.allclose(out, linear(row, packed)[0], rtol=1e-6, atol=1e-5)))

# %% [markdown]
r"""
**Step 3, C through Cython.** Cython is Python with C's types;
{see kernels_pyx/wrappers/linear.pxi "with one row for each row of x" "no memory for the quantized rows"} checks
the arrays, lets go of Python's lock (`nogil`) and hands plain pointers to C. The loop is in C; here is a
dot of this kind, the one that attention uses (its x is a query, its w a key; day 9):
"""

# %%
print(c_function("attention_q8.c", "q8_dot"))

# %% [markdown]
r"""
`int32_t sum`: C also keeps to the types you name, so the sum is named wider than the factors. `fmaf` is
the fused multiply-add.

**Steps 4 and 5, NEON and SDOT.** A processor has **registers**, places for the numbers it is working
on. Those of NEON, ARM's vector unit, hold 16 bytes: one instruction works on 16 int8 at a time
(**SIMD**, 单指令多数据). Each place for a number is a **lane** (通道). A C program names such an
instruction by a function that stands for it, an **intrinsic** (内建函数).

This is a group of 32 products on ARM. `k0`, `k1`, `q0`, `q1` are registers of 16 int8 each. The upper branch
is SDOT, on newer chips such as the board's; the lower is NEON without it.
"""

# %%
print(c_function("attention_q8_neon.h", "group_sums"))

# %% [markdown]
r"""
Read the lower branch from the inside:

* `vmull_s8(k, q)`: eight products. Two int8 give a result of up to 16,256, which needs **16 bits**: 8
  lanes of int16 fill the register. That is why half of `k0` (`vget_low_s8`) goes in at a time.
* `vmlal_high_s8(s, k, q)`: eight more products, of the upper halves, *added* to the first. Two products
  in 16 bits.
* `vpadalq_s16(sums, s)`: add **pairs** of the 16-bit lanes to four 32-bit sums: it widens.

Why two products in 16 bits and not four? The comment says it: $2 \cdot 128 \cdot 127 = 32{,}512$ fits under
32,767. A third would not be safe. Remember this line.

The upper branch does all of it in one instruction, twice. What does `vdotq_s32` do exactly? **Predict**:
16 products come out, but only four sums. Which products does sum 0 get: 0, 4, 8, 12, or 0, 1, 2, 3?
"""

# %%
first = w_code[0, :16], codes[0, :16]
sdot_lanes([0, 0, 0, 1000], *first)

# %% [markdown]
r"""
Neighbours: lane 0 takes products 0 … 3. Inside the instruction each product is widened to 32 bits before it
is added, so nothing can be lost between. The four sums are *added to* the accumulator `acc`; the next
SDOT goes on from there, and only at the end of a row somebody adds the four lanes.
"""

# %% [markdown] course={"id": "d05.a2", "kind": "A", "role": "card"}
r"""
### Exercise 5-2 A · be the instruction

8 minutes · difficulty 2/3 · 4 points · about 4 lines

Write `vdotq_s32` in NumPy, exactly: int32 `[4]` accumulator, two int8 `[16]`, result int32 `[4]`. Your
arguments must stay as they were.

The instruction **wraps**: where a sum passes $2^{31} - 1$ it goes on at $-2^{31}$. (Other processors have
dot products that *saturate*, that is, stop at the largest number. One reason why porting a kernel is
not a translation.) And `-128 * -128` is a legal product.

<details><summary>Hint 1: the products</summary>

int8 · int8 in NumPy is int8. `.astype(np.int32)` first; then `reshape(4, 4)` puts four neighbours into a row.

</details>

<details><summary>Hint 2: wrapping</summary>

An *array* of int32 wraps without a word; that is what you want here.

</details>
"""

# %% course={"id": "d05.a2", "kind": "A", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
# EXERCISE d05.a2
def vdotq_s32(acc, a, b):
    """SDOT: lane i of the result is acc[i] + the products 4 i … 4 i + 3 of a and b, modulo 2**32.

    acc: int32 [4]; a, b: int8 [16]. Returns int32 [4].
    >>> ramp = np.arange(16, dtype=np.int8)
    >>> vdotq_s32(np.zeros(4, np.int32), ramp, np.ones(16, np.int8)).tolist()
    [6, 22, 38, 54]
    """
    raise NotImplementedError("d05.a2")


# %% course={"id": "d05.a2", "kind": "A", "role": "check"}
check("d05.a2", vdotq_s32)

# %% [markdown]
r"""
With it you can run the kernel's inner loop without an ARM chip. One whole row, ten instructions, and the
integers must be right to the last one:
"""

# %%
instruction = solved_or(vdotq_s32, dot_ladder.sdot)
for r in (0, 1, 2):
    sums, used = [], 0
    for b in range(5):
        acc = np.zeros(4, np.int32)
        for half in range(2):
            part = slice(32 * b + 16 * half, 32 * b + 16 * half + 16)
            acc = instruction(acc, w_code[r, part], codes[0, part])
            used += 1
        sums.append(int(acc.sum()))
    exact = (w_code[r].astype(int) * codes[0].astype(int)).reshape(5, 32).sum(axis=1)
    print(f"row {r}: {used} instructions, block sums {sums}, exact: {sums == exact.tolist()}")

# %% [markdown]
r"""
### The ladder, timed

Same matrix, same row, every way that this machine has. (On x86 there is no NEON: you see AVX, Intel's
vector units. Among the board's variants are `neon` and `dotprod`.) Guess the ratio of the first to the last
line before you run it.
"""

# %% tags=["nbval-ignore-output"]
def milliseconds(run, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


lists = (codes[0].tolist(), scales[0].tolist(), w_code.tolist(), w_scale.astype(float).tolist())
times = {"Python loop": milliseconds(lambda: dot_ladder.python_product(*lists), 3),
         "NumPy": milliseconds(
             lambda: dot_ladder.numpy_product(codes[0], scales[0], w_code, w_scale), 15)}
for variant in kernels_pyx.VARIANTS:
    with backend.using(variant):
        times[f"compiled, {variant}"] = milliseconds(lambda: linear(row, packed), 51)
print("this machine: 896 rows of 160, median")
for name, ms in times.items():
    print(f"{name:28s} {ms:9.4f} ms   {times['Python loop'] / ms:8.0f} × the Python loop")

# %% [markdown]
r"""
Times depend on your machine and on who else uses it. Instructions do not. We counted them on **emulated
ARM**: a program that acts as the board's processor and counts every instruction and every byte that is
loaded or stored. A count is the difference of two runs that differ only in the number of rows, so all
that surrounds the rows cancels.

**Predict**: a row has 160 multiply-adds. How many instructions does each rung need for *one* of them?
"""

# %%
ladder = dot_ladder.recorded_counts()
print(f"recorded {ladder['date']} by `{ladder['command']}`, {ladder['cols']} columns, per row of w")
print(f"{'':12}{'instructions':>13}{'per multiply-add':>18}{'bytes loaded':>14}{'stored':>9}")
for record in ladder["records"]:
    print(f"{record['what']:12}{record['instructions']:13,.0f}"
          f"{record['instructions'] / ladder['cols']:18.3g}{record['loaded']:14,.0f}"
          f"{record['stored']:9,.0f}")
row_bytes = 5 * weight_blocks.BLOCK_BYTES["q8_0"]
print(f"a row of weights has {row_bytes} bytes   (derived)")

# %% [markdown]
r"""
Every rung has its own reason:

* **Python** spends 672 instructions on one multiply-add. Each number is an object: unpack it, ask its
  type, make a new object.
* **NumPy** needs 50 times fewer. But it loads 6,366 bytes for a row that has 170, because every
  intermediate array goes through memory.
* **C** is at 1.2. Number by number it would need three (load, load, multiply-add), so the compiler takes
  several at once.
* **NEON**, with instructions chosen by hand, adds two products in 16 bits before it widens: 0.46.
* **SDOT** halves that once more: 0.23, more than four multiply-adds for one instruction.

The last two load the same bytes, 187, and 170 of them are the row itself. (The others are the codes of x,
which 16 rows share: day 15 tells how.) There is nothing left to save: for a model that is larger than
the processor's caches, **from here on the memory decides**, not the arithmetic. So the lasting gain of
int8 is the plainest one: the row has 170 bytes instead of 640.
"""

# %% [markdown] course={"id": "d05.b2", "kind": "B", "role": "card"}
r"""
### Exercise 5-2 B · prove that it cannot overflow

10 minutes · difficulty 3/3 · 5 points

Integer sums are exact *as long as they fit*. Open
[attention_q8_neon.h](../kernels_pyx/c/attention_q8_neon.h) and
[attention_q8.c](../kernels_pyx/c/attention_q8.c). Codes of x are −127 … 127; those of w may be −128 in a
foreign file.

* `two_products`: the two lines, in the branch without SDOT, that add two products in 16 bits.
* `largest_group_sum`: the largest magnitude that the sum of one group of 32 can have.
* `restart`: `q8_dot4` lets a row's sums run on from group to group, and reads them as floats by a trick
  that works below $2^{22}$ only. Cite where they are started anew in time, condition included.

Then write the proof: for each of 16 bits, 32 bits and the trick, the largest value that can occur and the
limit. At $2^{22}$, how much room is left?
"""

# %% [markdown] course={"id": "d05.b2", "kind": "B", "role": "answer", "points": 5, "minutes": 10, "difficulty": 3}
r"""
<!-- ANSWER d05.b2 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d05.b2", "kind": "B", "role": "evidence"}
# EVIDENCE d05.b2
d05_b2 = {
    "two_products": "",  # "path:first-last"
    "largest_group_sum": None,  # a number
    "restart": "",  # "path:first-last"
}

# %% course={"id": "d05.b2", "kind": "B", "role": "check"}
check("d05.b2", d05_b2)

# %% [markdown]
r"""
## 5-3 对拍只改一个变量 · Change one variable

**对拍** (differential testing): run two programs that should do the same on the same input, and
compare. You do not need to know the right answer, only that the two must agree.

Here are two builds of our engine. The *reference* multiplies float32 weights with NumPy. The *fast* build
came out of five changes, each with a switch. Their authors say:

| switch | what it does |
|---|---|
| q8 weights | weights as Q8_0 blocks |
| q8 activations | activations as int8, per 32 (5-1) |
| blocks backwards | a row's blocks are added from the last to the first |
| tiles of 16 | the rows of x (one per token) go through a matrix 16 at a time, not all together |
| unrolled | where a row has an even number of blocks: sums of products in vector lanes (5-2) |

First the test that everybody does: ask both.
"""

# %%
reference, fast = builds.Build(), builds.Build(*builds.SWITCHES)
asked = {}
for index in range(4):
    p = prompt_of(engine, NeedleOptions(tokens=128), index)
    said = engine.encode(p.fact.sentence, allow_special=False)
    start = list(p.ids) + list(said)[:-2]
    asked[index] = [run_stages(engine.model, start, product=b)[-1][1] for b in (reference, fast)]
    top = [engine.decode([int(logits.argmax())]) for logits in asked[index]]
    print(f"{engine.decode(said)[:-1]!r:42} reference says {top[0]!r}, fast {top[1]!r}")

# %% [markdown]
r"""
They agree, four of four, and right. (A number is said digit by digit; we asked for its last one.) Ship it?

Compare more closely. A **logit** is the model's score for one possible next token; there are 1,657 of
them. How far apart are the two builds' scores?
"""

# %% tags=["nbval-ignore-output"]
for index, (one, two) in asked.items():
    second, best = np.sort(one)[-2:]
    print(f"prompt {index}: largest |difference| of a logit {np.abs(one - two).max():.2f}"
          f"   (best − second best: {best - second:.1f})   this machine")

# %% [markdown]
r"""
Not equal, of course not: the fast build rounds weights and activations to 8 bits. Is 0.2 what eight bits
cost, or is it a bug? Is 0.9? **Nobody can tell.** Five things changed between the two runs, and their
effects lie on top of each other. No amount of staring at these numbers will separate them.

The series' rule is the way out: **只改一个变量, change one variable.** Make a chain of builds so that
neighbours differ in exactly one switch:

reference → + q8 weights → + q8 activations → + blocks backwards → + tiles of 16 → + unrolled = fast

And now comes the gain. Between reference and fast all you could ask for is "close". Between two
neighbours you can often ask for more. **Write down, before you run anything, what each step may do:**

* may change every number, by rounding: needs a **tolerance gate** (误差门), with a bound that you can
  *derive*;
* may change nothing at all: a **bit gate** (逐位门). One different bit is a failure.

(What runs each build and keeps every intermediate row is {see course_lib/lab/stages.py run_stages}: one product per
matrix, and that product is the build's.)

Which of the five switches deserve the bit gate? Decide now.
"""

# %%
GATE = {"q8 weights": "tolerance", "q8 activations": "tolerance", "blocks backwards": "tolerance",
        "tiles of 16": "bits", "unrolled": "bits"}
print(*(f"{switch:17s} {gate}" for switch, gate in GATE.items()), sep="\n")

# %% [markdown]
r"""
*Tiles* change when a row is computed, not how. *Unrolled* adds whole numbers in another order;
whole numbers do not care. *Backwards* adds floats in another order, which rounds differently: a few last
digits.

### A gate that cannot fail is no gate

Before you trust a comparison, test it twice.

* **Negative control** (阴性对照): change *zero* variables. Run the same build twice. Any difference now
  is noise of the method itself, and the bit gate would be worthless.
* **Positive control** (阳性对照): plant a known difference, the smallest there is, one bit of one number in the middle of
  the model. The gate must ring.
"""

# %%
chain = [builds.SWITCHES[:n] for n in range(6)]
runs = [run_stages(engine.model, ids, product=builds.Build(*switches)) for switches in chain]
again = run_stages(engine.model, ids, product=builds.Build(*chain[-1]))


def all_bits_equal(run_a, run_b):
    return not any(differential.different_bits(x, y).any()
                   for (_, x), (_, y) in zip(run_a, run_b, strict=True))


planted = [(name, rows.copy()) for name, rows in again]
planted[15][1].reshape(-1).view(np.int32)[777] ^= 1  # the last bit of one number
print("stages in a run:", len(again), "· numbers:", sum(rows.size for _, rows in again))
print("negative control, same build twice:  bits equal", all_bits_equal(runs[-1], again))
print(f"positive control, one bit in {planted[15][0]!r}: bits equal",
      all_bits_equal(planted, again))

# %% [markdown]
r"""
### The bounds

The tolerance gate needs numbers that are not taken from the run it judges. Compare the very first
product, q, k and v of layer 0: up to there all builds have the same inputs, so only the one change acts,
and its largest possible error can be written down as in 5-1:

* q8 weights: half a step of every weight, times $|x_i|$;
* q8 activations: half a step of every $x_i$, times $|w_i|$;
* backwards: five float additions in either order, each rounded.

<details><summary>The three bounds as formulas, for those who want to check the cell</summary>

$u = 2^{-24}$ (a float32 is off by at most that share of itself); $w$ and $x$ are values, not codes.

* q8 weights: $\sum_b \tfrac{s^w_b}{2} (1 + \tfrac18) \sum_i |x_i|$. The eighth: the scale itself is
  rounded to 11 bits, and a code is up to 127.
* q8 activations: $\sum_b \tfrac{s^x_b}{2} \sum_i |w_i|$.
* backwards: $2 \cdot 5\, u\, T$ with $T = \sum_b |s^w_b s^x_b \cdot \text{sum}_b|$.

The first two also get $2 \cdot 160\, u \sum |w_i x_i|$ for what NumPy's own float sums may be off.

</details>

Behind this product the inputs differ already, and a bound would have to follow the error through all
layers: hard, and the numbers get huge. The bit gate has no such trouble: it looks at all 35 stages.

You need not read the cell line by line. Its last output is this gate's positive control: a real mistake
must be caught. (Not in *every* output: a bound allows for the worst case, and some outputs are lucky.)
"""

# %%
h, w = dict(runs[0])["layer 0 norm"], layers[0].qkv_proj
w_s, c = weight_blocks.split_blocks(weight_blocks.quantize_q8_0(w), "q8_0")
w_s, u = w_s.astype(np.float32), 2.0**-24
x_c, x_s = weight_blocks.quantize_activations(h)
x_by_block = np.abs(h).reshape(len(h), 5, 32).sum(axis=2)
w_by_block = w_s * np.abs(c.view(np.int8).astype(np.float32)).sum(axis=2)
block_sums = np.einsum("tbi,rbi->trb", x_c.reshape(-1, 5, 32).astype(np.float32),
                       c.view(np.int8).astype(np.float32))
terms = np.abs(block_sums) * (x_s[:, None] * w_s[None])
floats = 2 * 160 * u * (np.abs(h) @ np.abs(w).T)
BOUND = {"q8 weights": x_by_block @ w_s.T / 2 * 1.125 + floats,
         "q8 activations": x_s / 2 @ w_by_block.T + floats,
         "blocks backwards": 2 * 5 * u * terms.sum(axis=2)}
print("outputs bounded:", BOUND["q8 weights"].size, "· largest bounds:",
      {switch: float(f"{b.max():.1g}") for switch, b in BOUND.items()})
shifted = (block_sums * (np.roll(x_s, 1, axis=1)[:, None] * w_s[None])).sum(axis=2)
outside = np.abs(shifted - h @ w.T) > BOUND["q8 activations"] + BOUND["q8 weights"]
print("positive control, every block with its neighbour's scale: outputs outside the bound:",
      f"{outside.mean():.0%}")

# %% [markdown]
r"""
Now run the gates, one neighbouring pair at a time. On the left the logits, as in the first comparison. On
the right the verdict of the gate.
"""

# %% tags=["nbval-ignore-output"]
print("this machine, prompt 1")
print(f"{'one switch more':18}{'|Δ logit|':>10}   {'gate':10}verdict")
verdict = {}
for switch, before, after in zip(builds.SWITCHES, runs, runs[1:], strict=False):
    delta = np.abs(before[-1][1] - after[-1][1]).max()
    if GATE[switch] == "bits":
        verdict[switch] = all_bits_equal(before, after)
    else:
        moved = np.abs(dict(before)["layer 0 qkv"] - dict(after)["layer 0 qkv"])
        verdict[switch] = bool((moved <= BOUND[switch]).all())
    print(f"{switch:18}{delta:10.2g}   {GATE[switch]:10}{'passes' if verdict[switch] else 'FAILS'}")
whole_step = np.abs(runs[0][-1][1] - runs[-1][-1][1]).max()
print(f"{'all five at once':18}{whole_step:10.2g}   who knows")

# %%
print("gates that fail:", [switch for switch, passed in verdict.items() if not passed])
d8, bug = (np.abs(runs[i][-1][1] - runs[i + 1][-1][1]).max() for i in (1, 4))
print("on this prompt the failing step moves the logits less than 'q8 activations':", bool(bug < d8))

# %% [markdown]
r"""
**Found: unrolled.** It promised equal bits and does not keep the promise. Look at what would have missed
it:

* *The answers*: all right.
* *A tolerance on the logits*: "q8 activations", which is correct, moves them **more** than the bug does.
  Whatever tolerance lets eight bits pass lets the bug pass too, on this prompt. (On the other three the
  first comparison saw several times as much, and might have made you suspicious. You do not choose the
  prompt that your users meet.)
* *Comparing reference with fast*: the only gate possible there is a tolerance.

**Changing one variable is what makes the bit gate possible**, and the bit gate needs no tolerance. One
more thing, about "blocks backwards": it changes only last digits, but do not expect the logits to move by
last digits only. One of them can carry an activation over the edge between two codes, and then it is off
by a whole step. (If your table shows a millionth, run it with another of the four prompts.)

### Where?

We know which switch. Which line? The two neighbours went through the same 35 stages. Walk both runs in
the order of computation and stop at the **first** difference. Not the largest.
"""

# %% [markdown] course={"id": "d05.a3", "kind": "A", "role": "card"}
r"""
### Exercise 5-3 A · the first difference

12 minutes · difficulty 2/3 · 5 points · about 10 lines

Two runs, each a list of `(name, array)` in the order of computation. Return

* `None` if all bits are equal;
* `(name, index)`: the first stage with a difference, and in it the first number (in the order in which
  the array is read, last axis fastest), `index` a tuple of integers;
* `(name, None)` where a stage's shape or dtype differs;
* `ValueError` unless both have the same names in the same order.

**Bits**, not values: `0.0 == -0.0` and yet their bits differ (and $1/x$ will notice). `nan != nan`, and
yet two NaNs may have the same bits, or different ones. The arrays may be of any dtype and need not be
contiguous.

<details><summary>Hint 1: bits of an array</summary>

`np.ascontiguousarray(a).view(np.uint8)` shows the bytes. `.reshape(-1, a.itemsize)` after `.reshape(-1)`
gives one row of bytes per number.

</details>

<details><summary>Hint 2: from a position to an index</summary>

`np.unravel_index(position, shape)`; make its parts `int`.

</details>
"""

# %% course={"id": "d05.a3", "kind": "A", "role": "answer", "points": 5, "minutes": 12, "difficulty": 2}
# EXERCISE d05.a3
def first_difference(stages_a, stages_b):
    """The first number, in the order of computation, whose bits differ between two runs.

    stages_a, stages_b: [(name, array), ...]. Returns None, (name, index) or (name, None), see above.
    >>> one = [("norm", np.float32([1, 2])), ("out", np.float32([[3, 4], [5, 6]]))]
    >>> two = [("norm", np.float32([1, 2])), ("out", np.float32([[3, 4], [0, 6]]))]
    >>> first_difference(one, two)
    ('out', (1, 0))
    """
    raise NotImplementedError("d05.a3")


# %% course={"id": "d05.a3", "kind": "A", "role": "check"}
check("d05.a3", first_difference)

# %%
find = solved_or(first_difference, differential.first_difference)
good, bad = runs[4], runs[5]
print("tiles of 16 against its neighbour:", find(runs[3], runs[4]))
name, (token, output_number) = find(good, bad)
print(f"unrolled: first at {name!r}, token {token} {engine.decode([ids[token]])!r}, "
      f"output {output_number}")
largest = max(range(len(good)), key=lambda i: np.abs(good[i][1] - bad[i][1]).max())
print("largest difference: in layer", good[largest][0].split()[1], "· after the first:",
      largest > [n for n, _ in good].index(name))

# %% [markdown]
r"""
The first difference is in layer 0. The largest is two layers later, and it is innocent. Had you gone for the
biggest number, you would be reading the wrong code. How did it get there?
"""

# %%
wrong = differential.different_bits(dict(good)[name], dict(bad)[name])
print(f"{name}: {int(wrong.sum())} of {wrong.size:,d} numbers differ")
stage_differences(good, bad, label="this machine: share of numbers whose bits differ, "
                                   "'tiles of 16' against 'unrolled'")

# %% [markdown]
r"""
54 wrong numbers. One stage later it is a third of all numbers, one attention later nearly every one:
attention mixes each token into those after it. **Every stage behind the first difference looks broken.**
Nothing there is worth looking at.

Why are q, k and v right, and the *attention out* matrix wrong? Look at the switch's own words: "where a
row has an even number of blocks". 160 inputs are five blocks, 256 are eight. That is a clue for free.

### Shrink it

One wrong number: one row of x, one row of w, eight blocks. Both ways, block by block:
"""

# %%
x_row = dict(good)[name.replace("attention out", "context")][token : token + 1]
w_row = layers[0].o_proj[output_number : output_number + 1]
x_c, _ = weight_blocks.quantize_activations(x_row)
_, w_c = weight_blocks.split_blocks(weight_blocks.quantize_q8_0(w_row), "q8_0")
x_c, w_c = x_c.reshape(8, 1, 32), w_c.view(np.int8).reshape(8, 1, 32)
for b in range(8):
    plain, lanes = (int(f(x_c[b], w_c[b])[0, 0])
                    for f in (builds.sum_of_products, builds.unrolled_sum_of_products))
    print(f"block {b}: plain {plain:7d}   unrolled {lanes:7d}"
          + (f"   difference {lanes - plain}" if lanes != plain else ""))

# %% [markdown]
r"""
One block of eight. And the difference has a face: $-65{,}536 = -2^{16}$. **Something wrapped around in 16
bits, once.** Only now do you need to read code, and you know what to look for.
"""

# %%
print(inspect.getsource(builds.unrolled_sum_of_products))
b = next(b for b in range(8) if differential.different_bits(
    *(f(x_c[b], w_c[b]) for f in (builds.sum_of_products, builds.unrolled_sum_of_products))).any())
products = x_c[b, 0].astype(int) * w_c[b, 0].astype(int)
for lane in range(8):
    four = products[lane::8]
    print(f"lane {lane}: {' + '.join(f'({v})' for v in four.tolist()):40} = {four.sum():7d}"
          + ("   above 32767" if four.sum() > 32767 else ""))

# %% [markdown]
r"""
Four products in a 16-bit lane. In 5-2 you proved that two fit and that a third is not safe. Somebody saved one
widening instruction per block, and tested it on numbers that did not reach 32,767, as nearly all do not:
54 wrong sums out of 21,280.

Repair: widen after two products. And then the last step, which is often forgotten: **the same gates again,
and every other row of the table too.** A repair is a change like any other.
"""

# %%
def repaired(x, w):
    """8 lanes of 16 bits with two products each, twice a block, widened in between."""
    total = np.zeros((len(x), len(w)), np.float32)
    for first in range(0, 32, 16):
        for lane in range(8):
            pair = slice(first + lane, first + 16, 8)
            total += builds.sum_of_products(x[:, pair], w[:, pair]).astype(np.int32).astype(np.int16)
    return total


fixed = run_stages(engine.model, ids, product=builds.Build(*builds.SWITCHES, lanes=repaired))
print("bits equal after the repair:", find(runs[4], fixed) is None)
worst = np.full((1, 32), -128, np.int8), np.full((1, 32), -127, np.int8)
print("worst case by hand:", int(repaired(*worst)[0, 0]) == 32 * 128 * 127)

# %% [markdown]
r"""
The second line is the test that the author of the switch should have written: not typical numbers, the
**largest legal** ones.

### Is it always that easy?

The rule has a trap, and the chain above avoids it. Try the switch alone on the *reference*, with all others off:
"""

# %%
alone = run_stages(engine.model, ids, product=builds.Build("unrolled"))
print("reference + unrolled, bits equal to the reference:", find(runs[0], alone) is None)

# %% [markdown]
r"""
"No difference, so it is not this one." Wrong: with float weights there are no integer sums, so the switch does
nothing. **A variable that is not in use passes every test.** Change one variable *along a path that leads to the
failure*, and make sure at every step that the changed code ran at all.
"""

# %% [markdown] course={"id": "d05.b3", "kind": "B", "role": "card"}
r"""
### Exercise 5-3 B · switches that are not one variable

8 minutes · difficulty 2/3 · 4 points

The course's engine has switches too. Which of them, used in an A/B comparison, change **more than one**
thing that can move a number? `True` or `False`; search for the words "bit", "rounding" and "read back" in
[weight_blocks.py](../course_lib/weight_blocks.py), [backend.py](../course_lib/backend.py),
[engine/layers.py](../course_lib/engine/layers.py) and [engine/prefill.py](../course_lib/engine/prefill.py):

* `weights_q8_0`: `Engine.load(..., weights="q8_0")` against float32 weights;
* `threads`: `COURSE_THREADS=4` against 1, compiled kernels;
* `tile`: `tile=32` against 256 in `Engine.prefill`, compiled kernels;
* `kernel_numpy`: `COURSE_KERNEL=numpy` against a compiled variant;
* `kv_q8`: `prefill(..., kv="q8")` against `"f32"`. (The KV cache keeps two rows, K and V, of every token;
  days 7 to 9.)

And one place: `second_variable`, the line in `weight_blocks.py` where a product with Q8_0 weights *also*
rounds its other factor.

For one `True`, say which variables there are and describe a run, possible or not today, that would change
only one of them. For one `False`, say which gate it deserves.
"""

# %% [markdown] course={"id": "d05.b3", "kind": "B", "role": "answer", "points": 4, "minutes": 8, "difficulty": 2}
r"""
<!-- ANSWER d05.b3 -->
Answer: …

Evidence: path:first-last
"""

# %% course={"id": "d05.b3", "kind": "B", "role": "evidence"}
# EVIDENCE d05.b3
d05_b3 = {
    "weights_q8_0": None,  # True or False
    "threads": None,
    "tile": None,
    "kernel_numpy": None,
    "kv_q8": None,
    "second_variable": "",  # "path:first-last"
}

# %% course={"id": "d05.b3", "kind": "B", "role": "check"}
check("d05.b3", d05_b3)

# %% [markdown]
r"""
## Summary

1. With weights *and* activations as int8 codes, a dot product is whole numbers with one multiplication
   and one addition of floats per 32; the rounding of x costs about as much accuracy as that of w, and
   hardly any time.
2. SDOT widens each product to 32 bits before it adds four of them to a lane, so nothing is lost; how long such
   sums may run on is a proof, not a hope.
3. Two runs that differ in one variable can be compared bit by bit; two that differ in five cannot. Look
   for the *first* difference, test your gate with a negative and a positive control, then test the repair.

The formula: $y = \sum_b s^w_b s^x_b \sum_{i \in b} w_i x_i$ · The number: **65,536**, the difference that
told its own cause.

**Next**: day 6 takes the small parts of a layer, and the question which *order* of additions is the
right one. To read how far the bit gate carries in this engine, open
[docs/kernels.md](../docs/kernels.md): every kernel on every processor gives the same bits.
"""

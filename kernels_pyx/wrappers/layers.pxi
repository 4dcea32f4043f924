# RMSNorm, RoPE, SiLU gate, softmax and argmax.

cdef extern from "layers.h":
    cdef struct heads_to_split:
        const float *stacked
        const float *q_gain
        const float *k_gain
        const float *cos
        const float *sin
        float eps
        ptrdiff_t tokens
        ptrdiff_t heads
        ptrdiff_t kv_heads
        ptrdiff_t d
        ptrdiff_t q_head_stride
        ptrdiff_t k_head_stride
        ptrdiff_t v_head_stride
        float *q
        float *k
        float *v
    cdef struct layer_kernels:
        ptrdiff_t rms_norm(const float *x, const float *gain, ptrdiff_t rows, ptrdiff_t d,
                           float eps, float *out) nogil
        void rope_powers(float theta, ptrdiff_t pairs, float *powers) nogil
        ptrdiff_t rope_angles(const int64_t *positions, ptrdiff_t tokens, const float *frequencies,
                              ptrdiff_t pairs, float factor, float *cos, float *sin) nogil
        ptrdiff_t rope_tables(const int64_t *positions, ptrdiff_t tokens, ptrdiff_t pairs,
                              float theta, float *cos, float *sin) nogil
        ptrdiff_t rope(const float *x, const float *cos, const float *sin, ptrdiff_t tokens,
                       ptrdiff_t heads, ptrdiff_t d, float *out) nogil
        ptrdiff_t split_heads(const heads_to_split *input, int threads) nogil
        void silu_mul(const float *gate, ptrdiff_t gate_stride, const float *up,
                      ptrdiff_t up_stride, ptrdiff_t rows, ptrdiff_t d, int threads,
                      float *out) nogil
        void softmax(const float *x, ptrdiff_t rows, ptrdiff_t d, float *out) nogil
        int all_finite(const float *x, ptrdiff_t count) nogil
        ptrdiff_t argmax(const float *x, ptrdiff_t count) nogil


@operation
def rms_norm(Variant variant not None, x, gain, eps, out):
    """x / sqrt(mean of x^2 + eps) * gain of every row.

    x float32 [rows, d], gain float32 [d], eps a number of at least 0; out float32 [rows, d]
    receives the result. ValueError, with nothing written, for a mean square that is not finite or,
    with eps, 0 (names the row), for a gain that is not finite, shapes that disagree, d = 0 and an
    output that shares memory; TypeError for a wrong dtype.
    """
    cdef Array rows = Array(x, "x", "float32", 2)
    cdef Array gains = Array(gain, "gain", "float32", 1)
    cdef Array result = Array(out, "out", "float32", 2, True)
    cdef ptrdiff_t n = rows.size(0), d = rows.size(1), bad
    cdef float epsilon = finite(eps, "eps")
    if d == 0:
        raise ValueError("x must have at least one value a row")
    if epsilon < 0:
        raise ValueError(f"eps must be at least 0, not {eps}")
    gains.require_shape((d,), "to have one value for each column of x")
    result.require_shape((n, d), "like x")
    apart((result,), (rows, gains))
    if not variant.c.layers.all_finite(<const float *>gains.view.buf, d):
        raise ValueError("gain holds NaN or infinity")
    with nogil:
        bad = variant.c.layers.rms_norm(<const float *>rows.view.buf,
                                        <const float *>gains.view.buf, n, d, epsilon,
                                        <float *>result.view.buf)
    if bad >= 0:
        raise ValueError(f"the mean square of row {bad} of x plus eps is not finite or is 0")


@operation
def rope_powers(Variant variant not None, theta, out):
    """theta^(i / pairs) of every pair: out float32 [pairs] receives the nearest float32, of
    exponents that are float32 too. theta a float32 number above 0; ValueError for another.
    """
    cdef Array powers = Array(out, "out", "float32", 1, True)
    variant.c.layers.rope_powers(rope_base(theta), powers.size(0), <float *>powers.view.buf)


cdef float rope_base(object theta) except? -1:
    cdef float base = finite(theta, "theta")
    if base < 2.0 ** -126:
        raise ValueError(f"theta must be above 0 and no denormal number, not {theta}")
    return base


@operation
def rope_angles(Variant variant not None, positions, frequencies, factor, out_cos, out_sin):
    """cos and sin of position * frequency, a float32 product, both times factor.

    positions int64 [n]; frequencies float32 [pairs]; factor a float32 number; out_cos and out_sin
    float32 [n, pairs] receive the result, which without the factor is rope_tables's for its
    frequencies. ValueError, with nothing written, for an angle of 2^31 or more or none at all,
    shapes that disagree and outputs that share memory; TypeError for a wrong dtype.
    """
    cdef Array places = Array(positions, "positions", "int64", 1)
    cdef Array rates = Array(frequencies, "frequencies", "float32", 1)
    cdef Array cosines = Array(out_cos, "out_cos", "float32", 2, True)
    cdef Array sines = Array(out_sin, "out_sin", "float32", 2, True)
    cdef ptrdiff_t n = places.size(0), pairs = rates.size(0), bad
    cdef float times = finite(factor, "factor")
    cosines.require_shape((n, pairs), "(positions, frequencies)")
    sines.require_shape((n, pairs), "like out_cos")
    apart((cosines, sines), (places, rates))
    with nogil:
        bad = variant.c.layers.rope_angles(<const int64_t *>places.view.buf, n,
                                           <const float *>rates.view.buf, pairs, times,
                                           <float *>cosines.view.buf, <float *>sines.view.buf)
    if bad >= 0:
        raise ValueError(f"positions and frequencies must give angles below 2^31; "
                         f"position {(<const int64_t *>places.view.buf)[bad]} does not")


@operation
def rope_tables(Variant variant not None, positions, theta, out_cos, out_sin):
    """cos and sin of the RoPE angles: position * theta^(-i / pairs), the product in float32.

    positions int64 [n]; theta a float32 number above 0; out_cos and out_sin float32 [n, pairs]
    receive the result, the nearest float32 but for a few of a million, with the same bits on
    every machine. ValueError for an angle of 2^31 or more, shapes that disagree and outputs that
    share memory; TypeError for a wrong dtype.
    """
    cdef Array places = Array(positions, "positions", "int64", 1)
    cdef Array cosines = Array(out_cos, "out_cos", "float32", 2, True)
    cdef Array sines = Array(out_sin, "out_sin", "float32", 2, True)
    cdef ptrdiff_t n = places.size(0), pairs = cosines.size(1), bad
    cdef float base = rope_base(theta)
    cosines.require_shape((n, pairs), "to have one row for each position")
    sines.require_shape((n, pairs), "like out_cos")
    apart((cosines, sines), (places,))
    with nogil:
        bad = variant.c.layers.rope_tables(<const int64_t *>places.view.buf, n, pairs, base,
                                           <float *>cosines.view.buf, <float *>sines.view.buf)
    if bad >= 0:
        raise ValueError(f"positions must give angles below 2^31; "
                         f"position {(<const int64_t *>places.view.buf)[bad]} does not")


@operation
def rope(Variant variant not None, x, cos, sin, out):
    """Turn each pair (x[i], x[i + d/2]) of every head by the angle of its token.

    x float32 [tokens, heads, d], d even; cos, sin float32 [tokens, d/2]; out float32 [tokens,
    heads, d] receives the result. ValueError, with nothing written, for a result that is not
    finite (names the token), shapes that disagree and an output that shares memory; TypeError for
    a wrong dtype.
    """
    cdef Array rows = Array(x, "x", "float32", 3)
    cdef Array cosines = Array(cos, "cos", "float32", 2)
    cdef Array sines = Array(sin, "sin", "float32", 2)
    cdef Array result = Array(out, "out", "float32", 3, True)
    cdef ptrdiff_t tokens = rows.size(0), heads = rows.size(1), d = rows.size(2)
    cdef ptrdiff_t bad
    if d % 2:
        raise ValueError(f"x must have rows of an even length, not {d}")
    cosines.require_shape((tokens, d // 2), "to have one value for each token and pair")
    sines.require_shape((tokens, d // 2), "like cos")
    result.require_shape((tokens, heads, d), "like x")
    apart((result,), (rows, cosines, sines))
    if rows.view.len == 0:
        return
    with nogil:
        bad = variant.c.layers.rope(<const float *>rows.view.buf, <const float *>cosines.view.buf,
                                    <const float *>sines.view.buf, tokens, heads, d,
                                    <float *>result.view.buf)
    if bad >= 0:
        raise ValueError(f"x gives a number that is not finite at token {bad}")


cdef int require_gain(Variant variant, Array gain, ptrdiff_t d) except -1:
    """ValueError unless a gain has d finite values."""
    gain.require_shape((d,), "to have one value for each column")
    if not variant.c.layers.all_finite(<const float *>gain.view.buf, d):
        raise ValueError(f"{gain.name} holds NaN or infinity")
    return 0


@operation
def split_heads(Variant variant not None, stacked, q_gain, k_gain, eps, cos, sin, q, k, v):
    """Cut stacked heads into q, k and v, head-major; norm and turn q and k on the way.

    stacked float32 [tokens, heads + 2 kv_heads, d], d even; q_gain and k_gain float32 [d] or None
    for no norm; eps as in rms_norm; cos, sin float32 [tokens, d/2]. q float32 [heads, tokens, d],
    k and v [kv_heads, tokens, d] receive the rows, with the bits of rms_norm and rope; they may be
    views of some tokens of longer heads. ValueError for a mean square that is not finite or 0 and
    for a q or k that is not finite (names the token; some of the outputs are written then), for a
    gain that is not finite, shapes that disagree and outputs that share memory; TypeError for a
    wrong dtype.
    """
    cdef Array rows = Array(stacked, "stacked", "float32", 3)
    cdef Array cosines = Array(cos, "cos", "float32", 2)
    cdef Array sines = Array(sin, "sin", "float32", 2)
    cdef Array queries = Array(q, "q", "float32", 3, True, True)
    cdef Array keys = Array(k, "k", "float32", 3, True, True)
    cdef Array values = Array(v, "v", "float32", 3, True, True)
    cdef Array gain
    cdef heads_to_split input
    cdef tuple inputs = (rows, cosines, sines)
    cdef ptrdiff_t bad
    cdef int threads = num_threads
    input.tokens, input.d = rows.size(0), rows.size(2)
    input.heads, input.kv_heads = queries.size(0), keys.size(0)
    input.eps = finite(eps, "eps")
    if input.eps < 0:
        raise ValueError(f"eps must be at least 0, not {eps}")
    if input.d == 0 or input.d % 2:
        raise ValueError(f"stacked must have rows of an even length above 0, not {input.d}")
    rows.require_shape((input.tokens, input.heads + 2 * input.kv_heads, input.d),
                       "with the heads of q, k and v")
    cosines.require_shape((input.tokens, input.d // 2), "to have one value for each token and pair")
    sines.require_shape((input.tokens, input.d // 2), "like cos")
    queries.require_shape((input.heads, input.tokens, input.d), "to hold the tokens of stacked")
    keys.require_shape((input.kv_heads, input.tokens, input.d), "to hold the tokens of stacked")
    values.require_shape((input.kv_heads, input.tokens, input.d), "like k")
    input.q_gain = input.k_gain = NULL
    if q_gain is not None:
        gain = Array(q_gain, "q_gain", "float32", 1)
        require_gain(variant, gain, input.d)
        input.q_gain = <const float *>gain.view.buf
        inputs += (gain,)
    if k_gain is not None:
        gain = Array(k_gain, "k_gain", "float32", 1)
        require_gain(variant, gain, input.d)
        input.k_gain = <const float *>gain.view.buf
        inputs += (gain,)
    apart((queries, keys, values), inputs)
    input.stacked = <const float *>rows.view.buf
    input.cos, input.sin = <const float *>cosines.view.buf, <const float *>sines.view.buf
    input.q, input.k = <float *>queries.view.buf, <float *>keys.view.buf
    input.v = <float *>values.view.buf
    input.q_head_stride, input.k_head_stride = queries.head_stride(), keys.head_stride()
    input.v_head_stride = values.head_stride()
    with nogil:
        bad = variant.c.layers.split_heads(&input, threads)
    if bad >= 0:
        raise ValueError(f"stacked gives a mean square or a number that is not finite at "
                         f"token {bad}")


@operation
def silu_mul(Variant variant not None, gate, up, out):
    """gate / (1 + exp(-gate)) * up of every element.

    gate, up float32 [rows, d], which may be views of some columns of wider rows; out float32
    [rows, d] receives the result. ValueError for NaN or infinity, shapes that disagree and an
    output that shares memory; TypeError for a wrong dtype.
    """
    cdef Array gates = Array(gate, "gate", "float32", 2, False, True)
    cdef Array ups = Array(up, "up", "float32", 2, False, True)
    cdef Array result = Array(out, "out", "float32", 2, True)
    cdef ptrdiff_t rows = gates.size(0), d = gates.size(1), r
    cdef tuple shape = (rows, d)
    cdef const float *numbers
    cdef ptrdiff_t stride, up_stride
    cdef bint fine = True
    cdef Array array
    cdef int threads = num_threads
    ups.require_shape(shape, "like gate")
    result.require_shape(shape, "like gate")
    apart((result,), (gates, ups))
    if gates.view.len == 0:
        return
    for array in (gates, ups):
        numbers, stride = <const float *>array.view.buf, array.head_stride()
        with nogil:
            for r in range(rows):
                fine = fine and variant.c.layers.all_finite(numbers + r * stride, d)
        if not fine:
            raise ValueError(f"{array.name} holds NaN or infinity")
    stride, up_stride = gates.head_stride(), ups.head_stride()
    with nogil:
        variant.c.layers.silu_mul(<const float *>gates.view.buf, stride,
                                  <const float *>ups.view.buf, up_stride, rows, d, threads,
                                  <float *>result.view.buf)


@operation
def softmax(Variant variant not None, x, out):
    """exp(x - the largest of the row) over their sum, of every row.

    x float32 [rows, d], d at least 1; out float32 [rows, d] receives the result. The sum has 16
    lanes, added by halves. ValueError for NaN or infinity, another shape of out and an output that
    shares memory; TypeError for a wrong dtype.
    """
    cdef Array numbers = Array(x, "x", "float32", 2)
    cdef Array result = Array(out, "out", "float32", 2, True)
    cdef ptrdiff_t rows = numbers.size(0), d = numbers.size(1)
    cdef const float *source = <const float *>numbers.view.buf
    cdef bint fine
    if d == 0:
        raise ValueError("x must have at least one value a row")
    result.require_shape((rows, d), "like x")
    apart((result,), (numbers,))
    with nogil:
        fine = variant.c.layers.all_finite(source, rows * d)
        if fine:
            variant.c.layers.softmax(source, rows, d, <float *>result.view.buf)
    if not fine:
        raise ValueError("x holds NaN or infinity")


@operation
def all_finite(Variant variant not None, x):
    """Return whether none of the numbers of x float32 [n] is NaN or infinite."""
    cdef Array numbers = Array(x, "x", "float32", 1)
    cdef ptrdiff_t n = numbers.size(0)
    cdef bint fine
    with nogil:
        fine = variant.c.layers.all_finite(<const float *>numbers.view.buf, n)
    return fine


@operation
def argmax(Variant variant not None, x):
    """Return the index of the largest number of x float32 [n], n >= 1: the lowest one on ties.

    ValueError for NaN and for an empty array, TypeError for a wrong dtype.
    """
    cdef Array numbers = Array(x, "x", "float32", 1)
    cdef ptrdiff_t n = numbers.size(0), best
    if n == 0:
        raise ValueError("x must hold at least one number")
    with nogil:
        best = variant.c.layers.argmax(<const float *>numbers.view.buf, n)
    if best < 0:
        raise ValueError("x holds NaN")
    return best

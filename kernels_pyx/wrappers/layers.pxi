# RMSNorm, RoPE, SiLU gate and argmax.

cdef extern from "layers.h":
    cdef struct layer_kernels:
        ptrdiff_t rms_norm(const float *x, const float *gain, ptrdiff_t rows, ptrdiff_t d,
                           float eps, float *out) nogil
        ptrdiff_t rope_tables(const int64_t *positions, ptrdiff_t tokens, ptrdiff_t pairs,
                              float theta, float *cos, float *sin) nogil
        ptrdiff_t rope(const float *x, const float *cos, const float *sin, ptrdiff_t tokens,
                       ptrdiff_t heads, ptrdiff_t d, float *out) nogil
        void silu_mul(const float *gate, const float *up, ptrdiff_t count, float *out) nogil
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
    cdef float base = finite(theta, "theta")
    if base < 2.0 ** -126:
        raise ValueError(f"theta must be above 0 and no denormal number, not {theta}")
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


@operation
def silu_mul(Variant variant not None, gate, up, out):
    """gate / (1 + exp(-gate)) * up of every element.

    gate, up float32 [rows, d]; out float32 [rows, d] receives the result. ValueError for NaN or
    infinity, shapes that disagree and an output that shares memory; TypeError for a wrong dtype.
    """
    cdef Array gates = Array(gate, "gate", "float32", 2)
    cdef Array ups = Array(up, "up", "float32", 2)
    cdef Array result = Array(out, "out", "float32", 2, True)
    cdef tuple shape = (gates.size(0), gates.size(1))
    cdef ptrdiff_t count = gates.size(0) * gates.size(1)
    cdef bint fine
    cdef Array numbers
    ups.require_shape(shape, "like gate")
    result.require_shape(shape, "like gate")
    apart((result,), (gates, ups))
    if gates.view.len == 0:
        return
    for numbers in (gates, ups):
        with nogil:
            fine = variant.c.layers.all_finite(<const float *>numbers.view.buf, count)
        if not fine:
            raise ValueError(f"{numbers.name} holds NaN or infinity")
    with nogil:
        variant.c.layers.silu_mul(<const float *>gates.view.buf, <const float *>ups.view.buf,
                                  count, <float *>result.view.buf)


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

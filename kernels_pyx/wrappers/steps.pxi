# What a decoder layer does to one token beside attention, each step as a whole.

cdef extern from "linear.h":
    cdef enum weight_kind:
        Q8_0
        Q4_0
        FLOAT32
    cdef struct weight_matrix:
        weight_kind kind
        const void *codes
        const uint16_t *scales
        ptrdiff_t rows
        ptrdiff_t cols

cdef extern from "steps.h":
    cdef enum step_status:
        STEP_DONE
        STEP_BAD_MEAN
        STEP_BAD_NORMED
        STEP_BAD_RESULT
        STEP_NO_MEMORY
    cdef struct step_kernels:
        step_status attention_input(const float *x, const float *gain, float eps,
                                    const weight_matrix *qkv, const heads_to_split *out,
                                    int threads) nogil
        step_status attention_output(float *x, const float *context, const weight_matrix *w,
                                     int threads) nogil
        step_status swiglu(float *x, const float *gain, float eps, const weight_matrix *gate_up,
                           const weight_matrix *down, int threads) nogil


cdef class Weights:
    """Checked weights [rows, cols]: float32 with scales None, else panels as in linear_q8_0 (codes
    int8) or linear_q4_0 (uint8). Errors name the two arguments `name` and `name`_scales."""
    cdef Array codes, scales
    cdef weight_matrix c

    def __cinit__(self, object codes, object scales, str name, ptrdiff_t rows, ptrdiff_t cols):
        cdef ptrdiff_t panels = rows // 16 + (rows % 16 != 0)
        cdef str why = f"for {rows} outputs of {cols} columns"
        self.c.rows, self.c.cols = rows, cols
        self.c.scales = NULL
        if scales is None:
            self.c.kind = FLOAT32
            self.codes = Array(codes, name, "float32", 2)
            self.codes.require_shape((rows, cols), why)
        else:
            self.c.kind = Q4_0 if holds_uint8(codes) else Q8_0
            self.codes = Array(codes, name, "uint8" if self.c.kind == Q4_0 else "int8", 4)
            self.scales = Array(scales, name + "_scales", "float16", 3)
            self.codes.require_shape(
                (panels, cols // (8 if self.c.kind == Q4_0 else 4), 16, 4), why)
            self.scales.require_shape((panels, cols // 32, 16), why)
            self.c.scales = <const uint16_t *>self.scales.view.buf
        self.c.codes = self.codes.view.buf

    cdef tuple arrays(self):
        return (self.codes,) if self.scales is None else (self.codes, self.scales)


cdef bint holds_uint8(object array):
    cdef Py_buffer view
    cdef bint found
    if not PyObject_CheckBuffer(array):
        return False
    try:
        PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    except (BufferError, ValueError, TypeError, NotImplementedError):
        return False  # Array says what is wrong
    found = view.format == NULL or (view.format[0] == c"B" and view.format[1] == 0)
    PyBuffer_Release(&view)
    return found


cdef int require_one_row(Array x) except -1:
    """ValueError unless x is one row of a multiple of 32 values."""
    blocks_of_32(x)
    return x.require_shape((1, x.size(1)), "of one row")


cdef float at_least_0(object eps) except? -1:
    cdef float number = finite(eps, "eps")
    if number < 0:
        raise ValueError(f"eps must be at least 0, not {eps}")
    return number


cdef int require_done(step_status status, str what) except -1:
    if status == STEP_DONE:
        return 0
    if status == STEP_NO_MEMORY:
        raise MemoryError("no memory for the steps of a layer")
    if status == STEP_BAD_MEAN:
        raise ValueError("the mean square of row 0 of x plus eps is not finite or is 0")
    if status == STEP_BAD_NORMED:
        raise ValueError("x, normed and times gain, holds NaN or infinity")
    raise ValueError(f"x gives {what} that is not finite")


@operation
def attention_input(Variant variant not None, x, gain, eps, w, w_scales, q_gain, k_gain, cos, sin,
                    q, k, v):
    """rms_norm of one token, its product with the weights of q, k and v, and split_heads of that.

    x float32 [1, cols], gain float32 [cols], cols a multiple of 32; eps as in rms_norm; w float32
    [rows, cols] with w_scales None, or codes and w_scales as in linear_q8_0 or linear_q4_0; the
    others as in split_heads, with one token and d a multiple of 16. q, k and v receive the result,
    with the bits of the three operations. ValueError as theirs: for x, gains and results that are
    not finite, shapes that disagree and outputs that share memory; TypeError for a wrong dtype.
    """
    cdef Array row = Array(x, "x", "float32", 2)
    cdef Array gains = Array(gain, "gain", "float32", 1)
    cdef Array cosines = Array(cos, "cos", "float32", 2)
    cdef Array sines = Array(sin, "sin", "float32", 2)
    cdef Array queries = Array(q, "q", "float32", 3, True, True)
    cdef Array keys = Array(k, "k", "float32", 3, True, True)
    cdef Array values = Array(v, "v", "float32", 3, True, True)
    cdef Array some
    cdef Weights weights
    cdef heads_to_split out
    cdef tuple inputs
    cdef step_status status
    cdef int threads = num_threads
    require_one_row(row)
    require_gain(variant, gains, row.size(1))
    out.eps, out.tokens = at_least_0(eps), 1
    out.heads, out.kv_heads, out.d = queries.size(0), keys.size(0), queries.size(2)
    if out.d == 0 or out.d % 16:
        raise ValueError(f"q must have rows of a multiple of 16 values, not {out.d}")
    if out.heads == 0 or out.kv_heads == 0:
        raise ValueError("q and k must have at least one head")
    queries.require_shape((out.heads, 1, out.d), "of one token")
    keys.require_shape((out.kv_heads, 1, out.d), "to fit q")
    values.require_shape((out.kv_heads, 1, out.d), "like k")
    cosines.require_shape((1, out.d // 2), "to have one value for each pair of q")
    sines.require_shape((1, out.d // 2), "like cos")
    weights = Weights(w, w_scales, "w", (out.heads + 2 * out.kv_heads) * out.d, row.size(1))
    inputs = (row, gains, cosines, sines) + weights.arrays()
    out.q_gain = out.k_gain = out.stacked = NULL
    if q_gain is not None:
        some = Array(q_gain, "q_gain", "float32", 1)
        require_gain(variant, some, out.d)
        out.q_gain = <const float *>some.view.buf
        inputs += (some,)
    if k_gain is not None:
        some = Array(k_gain, "k_gain", "float32", 1)
        require_gain(variant, some, out.d)
        out.k_gain = <const float *>some.view.buf
        inputs += (some,)
    apart((queries, keys, values), inputs)
    out.cos, out.sin = <const float *>cosines.view.buf, <const float *>sines.view.buf
    out.q, out.k = <float *>queries.view.buf, <float *>keys.view.buf
    out.v = <float *>values.view.buf
    out.q_head_stride, out.k_head_stride = queries.head_stride(), keys.head_stride()
    out.v_head_stride = values.head_stride()
    with nogil:
        status = variant.c.steps.attention_input(
            <const float *>row.view.buf, <const float *>gains.view.buf, out.eps, &weights.c, &out,
            threads)
    require_done(status, "a query or key")


@operation
def attention_output(Variant variant not None, x, context, w, w_scales):
    """x += w · context of one token: x float32 [1, rows], context float32 [1, cols].

    cols a multiple of 32; w and w_scales as in attention_input. The bits are those of the product
    and a sum. ValueError, with nothing written, for NaN or infinity in context, shapes that
    disagree and an x that shares memory; TypeError for a wrong dtype.
    """
    cdef Array row = Array(x, "x", "float32", 2, True)
    cdef Array heads = Array(context, "context", "float32", 2)
    cdef Weights weights
    cdef step_status status
    cdef int threads = num_threads
    require_one_row(heads)
    row.require_shape((1, row.size(1)), "of one row")
    if row.size(1) == 0:
        raise ValueError("x must have at least one value")
    weights = Weights(w, w_scales, "w", row.size(1), heads.size(1))
    apart((row,), (heads,) + weights.arrays())
    require_finite_rows(variant, heads)
    with nogil:
        status = variant.c.steps.attention_output(
            <float *>row.view.buf, <const float *>heads.view.buf, &weights.c, threads)
    require_done(status, "")


@operation
def swiglu(Variant variant not None, x, gain, eps, gate_up, gate_up_scales, down, down_scales):
    """x += down · (SiLU(gate · h) · (up · h)) of one token, h = rms_norm(x).

    x float32 [1, hidden], gain float32 [hidden], eps as in rms_norm; gate_up [2 inner, hidden],
    the gate's rows above the up's, and down [hidden, inner], each float32 with its scales None, or
    codes and scales as in linear_q8_0 or linear_q4_0; hidden and inner multiples of 32. The bits
    are those of rms_norm, the products, silu_mul and a sum. ValueError, with nothing written, for
    numbers that are not finite, shapes that disagree and an x that shares memory; TypeError for a
    wrong dtype.
    """
    cdef Array row = Array(x, "x", "float32", 2, True)
    cdef Array gains = Array(gain, "gain", "float32", 1)
    cdef Weights first, second
    cdef ptrdiff_t inner
    cdef float epsilon = at_least_0(eps)
    cdef step_status status
    cdef int threads = num_threads
    require_one_row(row)
    require_gain(variant, gains, row.size(1))
    inner = inner_columns(down, down_scales, "down")
    first = Weights(gate_up, gate_up_scales, "gate_up", 2 * inner, row.size(1))
    second = Weights(down, down_scales, "down", row.size(1), inner)
    apart((row,), (gains,) + first.arrays() + second.arrays())
    with nogil:
        status = variant.c.steps.swiglu(<float *>row.view.buf, <const float *>gains.view.buf,
                                        epsilon, &first.c, &second.c, threads)
    require_done(status, "a gate, a value of up or a product of both")


cdef ptrdiff_t inner_columns(object down, object scales, str name) except -1:
    """Return the columns of the down weights, as the array says that has the fewest axes."""
    cdef Array array
    cdef ptrdiff_t inner
    if scales is None:
        array = Array(down, name, "float32", 2)
        inner = array.size(1)
    else:
        array = Array(scales, name + "_scales", "float16", 3)
        if array.size(1) > (<ptrdiff_t>1 << 40):
            raise ValueError(f"{name}_scales must have shape (panels, blocks, 16)")
        inner = 32 * array.size(1)
    if inner == 0 or inner % 32 or inner > (<ptrdiff_t>1 << 45):
        raise ValueError(f"{name}{'' if scales is None else '_scales'} must be for a multiple of 32 "
                         f"columns, not {inner}")
    return inner

# Attention of one query per head over the rows of a KV cache.

cdef extern from "attention.h":
    cdef struct kv_rows:
        const void *k
        const void *v
        const float *k_scale
        const float *v_scale
        ptrdiff_t num_kv_heads, n, d
        ptrdiff_t k_head_stride, v_head_stride, k_scale_stride, v_scale_stride
    cdef struct block_lists:
        const int32_t *ids
        ptrdiff_t lists, count, block_size
    cdef enum:
        MAX_ROW_D
        ATTEND_DONE
        ATTEND_BAD_OUTPUT
        ATTEND_NO_MEMORY
    ctypedef ptrdiff_t attention_function(const float *q, ptrdiff_t num_heads,
                                          const kv_rows *rows, const block_lists *blocks,
                                          int threads, float *out) noexcept nogil
    cdef struct attention_kernels:
        attention_function *two_pass
        attention_function *single_pass
        attention_function *single_pass_q8
        attention_function *single_pass_q8_row
        void exp(const float *x, ptrdiff_t count, float *out) noexcept nogil


@operation
def two_pass(Variant variant not None, q, k, v, k_scale, v_scale, blocks, block_size, out):
    """Exact attention of one query per head: all scores, their softmax, then V.

    q float32 [H, d]; k, v [KVH, n, d] float32 with scales None, or int8 with float32 scales
    [KVH, n]; their first axis may be strided, as in views cache[:, :n]. blocks None reads all
    tokens in order; int32 [lists, count] reads the tokens of these blocks of `block_size` in the
    order of the list: lists = H, or KVH for one list per group of query heads. out float32 [H, d]
    receives the result. ValueError for shapes that do not fit, ids out of range or twice in a
    list, and for a score or an output that is not finite (out is then undefined); TypeError for a
    wrong dtype.
    """
    run_attention(variant, variant.c.attention.two_pass, q, k, v, k_scale, v_scale, blocks,
                  block_size, out)


@operation
def single_pass(Variant variant not None, q, k, v, k_scale, v_scale, blocks, block_size, out):
    """Attention by online softmax in blocks of 32 tokens; arguments as for two_pass."""
    run_attention(variant, variant.c.attention.single_pass, q, k, v, k_scale, v_scale, blocks,
                  block_size, out)


@operation
def single_pass_q8(Variant variant not None, q, k, v, k_scale, v_scale, blocks, block_size, out):
    """As single_pass, with the query quantized per 32 values: int8 rows only, d % 32 == 0."""
    check_q8(q, k_scale, v_scale, "single_pass_q8")
    run_attention(variant, variant.c.attention.single_pass_q8, q, k, v, k_scale, v_scale, blocks,
                  block_size, out)


@operation
def single_pass_q8_row(Variant variant not None, q, k, v, k_scale, v_scale, blocks, block_size,
                       out):
    """As single_pass_q8, with one scale for each row of q. ValueError also for d > 132096, where
    the sum of a row's products may not fit into an int32."""
    cdef ptrdiff_t d = check_q8(q, k_scale, v_scale, "single_pass_q8_row")
    if d > MAX_ROW_D:
        raise ValueError(f"q must have at most {MAX_ROW_D} values a row, not {d}: the int32 sum "
                         "of a row's products could overflow")
    run_attention(variant, variant.c.attention.single_pass_q8_row, q, k, v, k_scale, v_scale,
                  blocks, block_size, out)


cdef ptrdiff_t check_q8(object q, object k_scale, object v_scale, str operation) except -1:
    """Return d; TypeError without scales, ValueError unless 32 divides d."""
    if k_scale is None or v_scale is None:
        raise TypeError("k_scale and v_scale must be float32 arrays of 2 axes: "
                        f"{operation} takes int8 rows only")
    cdef Array query = Array(q, "q", "float32", 2)
    if query.size(1) % 32:
        raise ValueError(f"q must have a multiple of 32 values a row, not {query.size(1)}")
    return query.size(1)


@operation
def exp(Variant variant not None, x, out):
    """The exponential function of the kernels, below 3 ulp off: out[i] = exp(x[i]).

    x and out float32 [n], the same array allowed; x up to 88, 0 below -87. ValueError for other
    lengths and for a larger x or NaN.
    """
    cdef Array source = Array(x, "x", "float32", 1)
    cdef Array target = Array(out, "out", "float32", 1, True)
    cdef const float *values = <const float *>source.view.buf
    cdef float *results = <float *>target.view.buf
    cdef ptrdiff_t count = source.size(0), i, bad = -1
    target.require_shape((count,), "like x")
    if values != results:
        apart((target,), (source,))
    with nogil:
        for i in range(count):
            if not values[i] <= 88.0:
                bad = i
                break
        if bad < 0:
            variant.c.attention.exp(values, count, results)
    if bad >= 0:
        raise ValueError(f"x[{bad}] is {values[bad]}, it must be at most 88")


cdef int run_attention(Variant variant, attention_function *function, object q, object k, object v,
                       object k_scale, object v_scale, object blocks, object block_size,
                       object out) except -1:
    cdef bint q8 = k_scale is not None or v_scale is not None
    cdef str dtype = "int8" if q8 else "float32"
    cdef Array queries = Array(q, "q", "float32", 2)
    cdef Array keys = Array(k, "k", dtype, 3, False, True)
    cdef Array values = Array(v, "v", dtype, 3, False, True)
    cdef Array k_scales = None, v_scales = None, lists = None
    cdef Array output = Array(out, "out", "float32", 2, True)
    cdef Private ids
    cdef kv_rows rows
    cdef block_lists chosen
    cdef ptrdiff_t num_heads = queries.size(0), status
    cdef int threads = num_threads

    rows.num_kv_heads, rows.n, rows.d = keys.size(0), keys.size(1), queries.size(1)
    if num_heads == 0 or rows.d == 0:
        raise ValueError("q must hold at least one query of at least one value")
    if rows.num_kv_heads == 0 or rows.n == 0:
        raise ValueError("k must hold at least one row; the context is empty")
    if num_heads % rows.num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which do not divide over the "
                         f"{rows.num_kv_heads} of k")
    keys.require_shape((rows.num_kv_heads, rows.n, rows.d), "to fit q")
    values.require_shape((rows.num_kv_heads, rows.n, rows.d), "like k")
    output.require_shape((num_heads, rows.d), "like q")
    rows.k, rows.v = keys.view.buf, values.view.buf
    rows.k_head_stride, rows.v_head_stride = keys.head_stride(), values.head_stride()
    rows.k_scale = rows.v_scale = NULL
    rows.k_scale_stride = rows.v_scale_stride = 0
    inputs = [queries, keys, values]
    if q8:
        k_scales = Array(k_scale, "k_scale", "float32", 2, False, True)
        v_scales = Array(v_scale, "v_scale", "float32", 2, False, True)
        k_scales.require_shape((rows.num_kv_heads, rows.n), "to have one for each row of k")
        v_scales.require_shape((rows.num_kv_heads, rows.n), "to have one for each row of v")
        rows.k_scale, rows.v_scale = <float *>k_scales.view.buf, <float *>v_scales.view.buf
        rows.k_scale_stride = k_scales.head_stride()
        rows.v_scale_stride = v_scales.head_stride()
        inputs += [k_scales, v_scales]

    chosen.ids, chosen.lists, chosen.count = NULL, rows.num_kv_heads, 0
    # A block longer than the cache is the cache, and its size cannot overflow a product.
    chosen.block_size = min(whole(block_size, "block_size", 1, <ptrdiff_t>((<size_t>-1) >> 1)), rows.n)
    if blocks is not None:
        lists = Array(blocks, "blocks", "int32", 2)
        ids = Private(lists)
        chosen.ids = <const int32_t *>ids.data
        chosen.lists, chosen.count = lists.size(0), lists.size(1)
        check_blocks(chosen, num_heads, rows.num_kv_heads, rows.n)
        inputs.append(lists)
    apart((output,), tuple(inputs))

    cdef const float *query = <const float *>queries.view.buf
    cdef float *result = <float *>output.view.buf
    with nogil:
        status = variant.c.quantize.first_bad_row(query, num_heads, rows.d)
    if status >= 0:
        raise ValueError(f"q holds NaN or infinity in row {status}")
    with nogil:
        status = function(query, num_heads, &rows, &chosen, threads, result)
    if status == ATTEND_NO_MEMORY:
        raise MemoryError("no memory for the scores")
    if status == ATTEND_BAD_OUTPUT:
        raise ValueError("the output is not finite; a V row or its scale is bad")
    if status != ATTEND_DONE:
        raise ValueError(f"the score of K row {status} is not finite; the row or its scale is bad")
    return 0


cdef int check_blocks(block_lists chosen, ptrdiff_t num_heads, ptrdiff_t num_kv_heads,
                      ptrdiff_t n) except -1:
    """ValueError unless every list holds blocks that exist, each once."""
    cdef ptrdiff_t num_blocks = (n - 1) // chosen.block_size + 1, i, list_index
    cdef ptrdiff_t *seen_in
    cdef int32_t block
    if chosen.lists != num_heads and chosen.lists != num_kv_heads:
        raise ValueError(f"blocks must have a list for each of {num_heads} query heads or of "
                         f"{num_kv_heads} KV heads, not {chosen.lists}")
    if chosen.count == 0:
        raise ValueError("blocks must hold at least one block in each list")
    seen_in = <ptrdiff_t *>PyMem_Malloc(<size_t>num_blocks * sizeof(ptrdiff_t))
    if seen_in == NULL:
        raise MemoryError("no memory to check the blocks")
    try:
        for i in range(num_blocks):
            seen_in[i] = -1
        for list_index in range(chosen.lists):
            for i in range(chosen.count):
                block = chosen.ids[list_index * chosen.count + i]
                if not 0 <= block < num_blocks:
                    raise ValueError(f"blocks holds {block} in list {list_index}, but the blocks "
                                     f"of {n} tokens are 0 to {num_blocks - 1}")
                if seen_in[block] == list_index:
                    raise ValueError(f"blocks holds {block} twice in list {list_index}")
                seen_in[block] = list_index
    finally:
        PyMem_Free(seen_in)
    return 0

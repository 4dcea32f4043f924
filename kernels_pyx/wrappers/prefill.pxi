# Prefill attention, whole or part by part; antidiagonal scores, and the mass of blocks from them.

from libc.stdint cimport INTPTR_MAX as LARGEST_INDEX

cdef extern from "prefill.h":
    cdef struct prefill_input:
        const float *q
        const float *k
        const float *v
        const int64_t *visible
        ptrdiff_t num_heads
        ptrdiff_t num_kv_heads
        ptrdiff_t rows
        ptrdiff_t n
        ptrdiff_t d
        ptrdiff_t k_head_stride
        ptrdiff_t v_head_stride
    cdef struct block_sums_input:
        const float *scores
        ptrdiff_t heads
        ptrdiff_t rows
        ptrdiff_t columns
        ptrdiff_t size
        ptrdiff_t seen
        ptrdiff_t causal_from
        ptrdiff_t first_row
        ptrdiff_t last_row
        float rate
    cdef enum:
        PREFILL_DONE
        PREFILL_BAD_OUTPUT
        PREFILL_NO_MEMORY
    cdef struct prefill_kernels:
        ptrdiff_t attention(const prefill_input *input, ptrdiff_t importance_from, int threads,
                            float *out, float *importance) nogil
        ptrdiff_t partial(const prefill_input *input, ptrdiff_t block_size,
                          const unsigned char *reads, int threads, float *out, double *lse) nogil
        void merge(const float *part, const double *part_lse, ptrdiff_t rows, ptrdiff_t d,
                   int threads, float *out, double *lse) nogil
        ptrdiff_t antidiagonal_scores(const float *q, ptrdiff_t num_heads, ptrdiff_t q_rows,
                                      ptrdiff_t q_head_stride, const float *k,
                                      ptrdiff_t num_kv_heads, ptrdiff_t k_rows,
                                      ptrdiff_t k_head_stride, ptrdiff_t d, ptrdiff_t stride,
                                      int threads, float *out) nogil
        ptrdiff_t block_sums(const block_sums_input *input, int threads, float *out) nogil


cdef int require_heads(ptrdiff_t num_heads, ptrdiff_t num_kv_heads) except -1:
    """ValueError unless there are query heads that divide over the KV heads."""
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"the {num_heads} heads of q must divide over the {num_kv_heads} of k")
    return 0


cdef int require_visible(const prefill_input *input) except -1:
    """ValueError unless every row reads tokens that are there."""
    cdef ptrdiff_t i
    for i in range(input.rows):
        if not 0 <= input.visible[i] <= input.n:
            raise ValueError(f"visible must be 0 to {input.n}, the tokens of k; row {i} has "
                             f"{input.visible[i]}")
    return 0


cdef int require_logarithms(const double *lse, ptrdiff_t count, str name) except -1:
    """ValueError for an LSE that is none."""
    cdef ptrdiff_t i
    cdef int bad = 0
    for i in range(count):
        bad |= not lse[i] < INFINITY
    if bad:
        raise ValueError(f"{name} must not hold NaN or +inf; -inf is a row without tokens so far")
    return 0


@operation
def prefill_attention(Variant variant not None, q, k, v, visible, out, importance=None,
                      importance_from_row=0):
    """Attention of every query row over its own prefix of the rows, as two_pass computes it.

    q float32 [num_heads, rows, d]; k, v float32 [num_kv_heads, n, d], views of a longer cache
    allowed; visible int64 [rows]: row i reads tokens 0 to visible[i] - 1, in any order of sizes (a
    row that reads nothing gives zeros); out float32 [num_heads, rows, d] receives the result.
    importance, float32 [num_heads, n] or None, gets the softmax weights of each head's rows from
    importance_from_row on added, row after row. ValueError, with nothing written, for a score or
    output that is not finite, shapes that disagree and outputs that share memory; TypeError for
    a wrong dtype.
    """
    cdef Array queries = Array(q, "q", "float32", 3)
    cdef Array keys = Array(k, "k", "float32", 3, False, True)
    cdef Array values = Array(v, "v", "float32", 3, False, True)
    cdef Array seen = Array(visible, "visible", "int64", 1)
    cdef Array result = Array(out, "out", "float32", 3, True)
    cdef Array weights
    cdef Private prefixes
    cdef prefill_input input
    cdef ptrdiff_t first = whole(importance_from_row, "importance_from_row", 0, LARGEST_INDEX)
    cdef ptrdiff_t status
    cdef float *sums = NULL
    cdef int threads = num_threads
    input.num_heads, input.rows, input.d = queries.size(0), queries.size(1), queries.size(2)
    input.num_kv_heads, input.n = keys.size(0), keys.size(1)
    if input.d == 0:
        raise ValueError("q must have at least one value a row")
    require_heads(input.num_heads, input.num_kv_heads)
    keys.require_shape((input.num_kv_heads, input.n, input.d), "with rows as long as those of q")
    values.require_shape((input.num_kv_heads, input.n, input.d), "like k")
    seen.require_shape((input.rows,), "to have one number for each row of q")
    result.require_shape((input.num_heads, input.rows, input.d), "like q")
    if importance is None:
        apart((result,), (queries, keys, values, seen))
    else:
        weights = Array(importance, "importance", "float32", 2, True)
        weights.require_shape((input.num_heads, input.n), "(query heads, tokens)")
        apart((result, weights), (queries, keys, values, seen))
        sums = <float *>weights.view.buf
    input.q, input.k = <const float *>queries.view.buf, <const float *>keys.view.buf
    prefixes = Private(seen)
    input.v, input.visible = <const float *>values.view.buf, <const int64_t *>prefixes.data
    input.k_head_stride, input.v_head_stride = keys.head_stride(), values.head_stride()
    require_visible(&input)
    if input.rows == 0:
        return
    with nogil:
        status = variant.c.prefill.attention(&input, first, threads,
                                             <float *>result.view.buf, sums)
    if status >= 0:
        raise ValueError(f"the score of K row {status} is not finite; the row or its query is bad")
    if status == PREFILL_BAD_OUTPUT:
        raise ValueError("the output is not finite; a V row is bad")
    if status == PREFILL_NO_MEMORY:
        raise MemoryError(f"prefill attention over {input.n} tokens")


@operation
def partial_attention(Variant variant not None, q, k, v, visible, block_size, reads, out, lse):
    """Attention of query rows over a part of the context, merged into that of the parts before.

    q, k, v and visible as in prefill_attention. The part is read in blocks of `block_size` rows,
    each merged in ascending order; reads uint8 [blocks, num_kv_heads] or None for all: whether the
    query heads of a KV head read a block. out float32 [num_heads, rows, d] and
    lse float64 [num_heads, rows], natural logarithms, hold the parts before, zeros and -inf where
    there are none, and receive the merged ones. ValueError for a score or output that is not
    finite, when out and lse may be written in part, and, with nothing written, for an lse that is
    NaN or +inf, shapes that disagree and outputs that share memory; TypeError for a wrong dtype.
    """
    cdef Array queries = Array(q, "q", "float32", 3)
    cdef Array keys = Array(k, "k", "float32", 3, False, True)
    cdef Array values = Array(v, "v", "float32", 3, False, True)
    cdef Array seen = Array(visible, "visible", "int64", 1)
    cdef Array result = Array(out, "out", "float32", 3, True)
    cdef Array sums = Array(lse, "lse", "float64", 2, True)
    cdef Array flags
    cdef Private prefixes
    cdef prefill_input input
    cdef ptrdiff_t size = whole(block_size, "block_size", 1, LARGEST_INDEX), blocks
    cdef ptrdiff_t status
    cdef const unsigned char *reading = NULL
    cdef double *logarithms = <double *>sums.view.buf
    cdef int threads = num_threads
    input.num_heads, input.rows, input.d = queries.size(0), queries.size(1), queries.size(2)
    input.num_kv_heads, input.n = keys.size(0), keys.size(1)
    if input.d == 0:
        raise ValueError("q must have at least one value a row")
    require_heads(input.num_heads, input.num_kv_heads)
    keys.require_shape((input.num_kv_heads, input.n, input.d), "with rows as long as those of q")
    values.require_shape((input.num_kv_heads, input.n, input.d), "like k")
    seen.require_shape((input.rows,), "to have one number for each row of q")
    result.require_shape((input.num_heads, input.rows, input.d), "like q")
    sums.require_shape((input.num_heads, input.rows), "to have one number for each row of q")
    if reads is None:
        apart((result, sums), (queries, keys, values, seen))
    else:
        flags = Array(reads, "reads", "uint8", 2)
        blocks = input.n // size + (input.n % size != 0)
        flags.require_shape((blocks, input.num_kv_heads), "(blocks of k, heads of k)")
        apart((result, sums), (queries, keys, values, seen, flags))
        reading = <const unsigned char *>flags.view.buf
    input.q, input.k = <const float *>queries.view.buf, <const float *>keys.view.buf
    prefixes = Private(seen)
    input.v, input.visible = <const float *>values.view.buf, <const int64_t *>prefixes.data
    input.k_head_stride, input.v_head_stride = keys.head_stride(), values.head_stride()
    require_visible(&input)
    require_logarithms(logarithms, input.num_heads * input.rows, "lse")
    if input.rows == 0 or input.n == 0:
        return
    with nogil:
        status = variant.c.prefill.partial(&input, size, reading, threads,
                                           <float *>result.view.buf, logarithms)
    if status >= 0:
        raise ValueError(f"the score of K row {status} is not finite; the row or its query is bad")
    if status == PREFILL_BAD_OUTPUT:
        raise ValueError("the output is not finite; a V row is bad")
    if status == PREFILL_NO_MEMORY:
        raise MemoryError(f"partial attention over {input.n} tokens")


@operation
def merge_parts(Variant variant not None, part, part_lse, out, lse):
    """Merge attention over a part of the context into that over the parts before.

    part float32 [rows, d] with part_lse float64 [rows], natural logarithms, -inf where a row has no
    tokens; out float32 [rows, d] and lse float64 [rows] hold the parts before, zeros and -inf where
    there are none, and receive the merged ones. ValueError, with nothing written, for an LSE that
    is NaN or +inf, shapes that disagree and outputs that share memory; TypeError for a wrong dtype.
    """
    cdef Array added = Array(part, "part", "float32", 2)
    cdef Array added_sums = Array(part_lse, "part_lse", "float64", 1)
    cdef Array result = Array(out, "out", "float32", 2, True)
    cdef Array sums = Array(lse, "lse", "float64", 1, True)
    cdef ptrdiff_t rows = added.size(0), d = added.size(1)
    cdef const double *logarithms = <const double *>added_sums.view.buf
    cdef int threads = num_threads
    if d == 0:
        raise ValueError("part must have at least one value a row")
    added_sums.require_shape((rows,), "to have one number for each row of part")
    result.require_shape((rows, d), "like part")
    sums.require_shape((rows,), "to have one number for each row of part")
    apart((result, sums), (added, added_sums))
    require_logarithms(logarithms, rows, "part_lse")
    require_logarithms(<const double *>sums.view.buf, rows, "lse")
    if rows == 0:
        return
    with nogil:
        variant.c.prefill.merge(<const float *>added.view.buf, logarithms, rows, d, threads,
                                <float *>result.view.buf, <double *>sums.view.buf)


@operation
def antidiagonal_scores(Variant variant not None, q, k, stride, out):
    """Sums of raw scores along antidiagonals of squares of `stride` queries by `stride` keys.

    q float32 [num_heads, Lq, d], k float32 [num_kv_heads, Lk, d], views of longer arrays
    allowed; stride divides Lq and Lk; out float32 [num_heads, Lq / stride, Lk / stride] receives
    out[h, m, n] = sum over i < stride of q[h, m stride + stride - 1 - i] . k[n stride + i], not
    scaled: one dot over the stride * d products. ValueError, with nothing written, for a sum that
    is not finite, for shapes and lengths that do not fit and an output that shares memory with q
    or k; TypeError for a wrong dtype.
    """
    cdef Array queries = Array(q, "q", "float32", 3, False, True)
    cdef Array keys = Array(k, "k", "float32", 3, False, True)
    cdef Array result = Array(out, "out", "float32", 3, True)
    cdef ptrdiff_t step = whole(stride, "stride", 1, LARGEST_INDEX), status
    cdef ptrdiff_t num_heads = queries.size(0), q_rows = queries.size(1), d = queries.size(2)
    cdef ptrdiff_t num_kv_heads = keys.size(0), k_rows = keys.size(1)
    cdef ptrdiff_t q_head_stride = queries.head_stride(), k_head_stride = keys.head_stride()
    cdef int threads = num_threads
    if d == 0:
        raise ValueError("q must have at least one value a row")
    require_heads(num_heads, num_kv_heads)
    keys.require_shape((num_kv_heads, k_rows, d), "with rows as long as those of q")
    if q_rows % step or k_rows % step:
        raise ValueError(f"stride must divide the {q_rows} rows of q and the {k_rows} of k, "
                         f"{step} does not")
    result.require_shape((num_heads, q_rows // step, k_rows // step),
                         "(heads, rows of q / stride, rows of k / stride)")
    apart((result,), (queries, keys))
    if q_rows == 0 or k_rows == 0:
        return
    with nogil:
        status = variant.c.prefill.antidiagonal_scores(
            <const float *>queries.view.buf, num_heads, q_rows, q_head_stride,
            <const float *>keys.view.buf, num_kv_heads, k_rows, k_head_stride, d, step, threads,
            <float *>result.view.buf)
    if status == PREFILL_BAD_OUTPUT:
        raise ValueError("a score is not finite; a row of q or k is bad")
    if status == PREFILL_NO_MEMORY:
        raise MemoryError(f"antidiagonal scores of stride {step}")


@operation
def block_sums(Variant variant not None, scores, size, rate, seen, causal_from, first_row, last_row,
               out):
    """The softmax mass of blocks of `size` rows by `size` columns of antidiagonal scores.

    scores float32 [heads, rows, columns]; row r sees the first `seen` columns, at least one, and
    with causal_from >= 0 (-1: all of them) none behind causal_from + r; the weight of a score is
    e^(rate * (score - the largest that its row sees)), rate above 0; rows outside of first_row to
    last_row - 1 count nothing. out float32 [heads, rows / size, columns / size], rounded up,
    receives the sums over blocks of each row's weights, divided by their total. ValueError, with
    nothing written, for a score that is not finite, numbers and shapes that do not fit and an
    output that shares memory; TypeError for a wrong dtype.
    """
    cdef Array given = Array(scores, "scores", "float32", 3)
    cdef Array result = Array(out, "out", "float32", 3, True)
    cdef block_sums_input input
    cdef ptrdiff_t status
    cdef int threads = num_threads
    input.scores = <const float *>given.view.buf
    input.heads, input.rows, input.columns = given.size(0), given.size(1), given.size(2)
    if input.columns == 0:
        raise ValueError("scores must have at least one column")
    input.size = whole(size, "size", 1, LARGEST_INDEX)
    input.seen = whole(seen, "seen", 1, input.columns)
    input.causal_from = whole(causal_from, "causal_from", -1, LARGEST_INDEX - input.rows - 1)
    input.first_row = whole(first_row, "first_row", 0, input.rows)
    input.last_row = whole(last_row, "last_row", 0, input.rows)
    input.rate = finite(rate, "rate")
    if not input.rate > 0:
        raise ValueError(f"rate must be above 0, not {rate}")
    input.size = min(input.size, max(input.rows, input.columns))
    result.require_shape((input.heads, input.rows // input.size + (input.rows % input.size != 0),
                          input.columns // input.size + (input.columns % input.size != 0)),
                         "(heads, blocks of rows, blocks of columns)")
    apart((result,), (given,))
    if input.heads == 0 or input.rows == 0:
        return
    with nogil:
        status = variant.c.prefill.block_sums(&input, threads, <float *>result.view.buf)
    if status == PREFILL_BAD_OUTPUT:
        raise ValueError("scores holds NaN or infinity")
    if status == PREFILL_NO_MEMORY:
        raise MemoryError(f"the mass of blocks of {input.columns} columns")

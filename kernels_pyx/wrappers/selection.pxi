# Choice of the blocks that a query reads, and attention over them.

from libc.stdint cimport INT32_MAX, PTRDIFF_MAX

cdef extern from "selection.h":
    cdef struct choice:
        const float *importance
        ptrdiff_t n_blocks, k, reserved
        int32_t *order
        int32_t *ids
        int32_t *recency
        int32_t *evicted
    cdef enum sparse_status:
        SPARSE_DONE, SPARSE_BAD_PROBE, SPARSE_BAD_SCORE, SPARSE_BAD_OUTPUT, SPARSE_NO_MEMORY
    cdef struct selection_kernels:
        void probe_scores(const float *q, ptrdiff_t heads, const kv_rows *rows,
                          const kv_rows *samples, ptrdiff_t block_size, ptrdiff_t n_probe,
                          float *scores, int threads) nogil
        ptrdiff_t first_bad_value(const float *x, ptrdiff_t count) nogil
        void importance_sums(const float *importance, ptrdiff_t n, ptrdiff_t block_size,
                             float *sums) nogil
        int select_blocks(const float *scores, ptrdiff_t heads, const choice *choice) nogil
        sparse_status sparse_attention(const float *q, ptrdiff_t heads, const kv_rows *rows,
                                       const kv_rows *samples, ptrdiff_t block_size,
                                       ptrdiff_t n_probe, int shared, const choice *choice,
                                       float *scores, float *out, int threads, ptrdiff_t *bad_token) nogil

cdef class PackedSamples:
    """The sampled K rows of the first full blocks of a context, copied together; checked."""
    cdef Array k, scale
    cdef kv_rows rows

    def __init__(self, k, scale, str name, str scale_name, bint int8):
        self.k = Array(k, name, "int8" if int8 else "float32", 3, heads=True)
        if (scale is not None) != int8:
            raise ValueError(f"{scale_name} belongs to int8 rows, and they need it")
        self.rows.num_kv_heads, self.rows.n, self.rows.d = (
            self.k.size(0), self.k.size(1), self.k.size(2))
        self.rows.k, self.rows.k_head_stride = self.k.view.buf, self.k.head_stride()
        self.rows.v, self.rows.k_scale, self.rows.v_scale = NULL, NULL, NULL
        if scale is not None:
            self.scale = Array(scale, scale_name, "float32", 2, heads=True)
            self.scale.require_shape((self.k.size(0), self.k.size(1)),
                                     "to have one for each row of samples")
            self.rows.k_scale = <const float *>self.scale.view.buf
            self.rows.k_scale_stride = self.scale.head_stride()

    cdef int require_fit(self, const kv_rows *of, ptrdiff_t block_size, ptrdiff_t n_probe) except -1:
        """ValueError unless these can be the samples of full blocks of these rows."""
        cdef ptrdiff_t n = self.rows.n, full = of.n // block_size
        cdef ptrdiff_t each = (block_size - 1) // max(1, block_size // n_probe) + 1
        self.k.require_shape((of.num_kv_heads, n, of.d), "to fit k")
        if n % each or n // each > full:
            raise ValueError(f"{self.k.name} must hold {each} rows for each of at most {full} full "
                             f"blocks, not {n}")
        return 0

    cdef tuple arrays(self):
        return (self.k,) if self.scale is None else (self.k, self.scale)


cdef class ProbedRows:
    """Queries, the cache rows that they read, and how these are cut into blocks; checked."""
    cdef Array q, k, v, k_scale, v_scale
    cdef PackedSamples samples
    cdef kv_rows rows
    cdef const kv_rows *packed_rows
    cdef ptrdiff_t heads, n_blocks, block_size, n_probe

    def __init__(self, Variant variant not None, q, k, v, k_scale, v_scale, block_size, n_probe):
        cdef str dtype = "float32" if k_scale is None else "int8"
        cdef ptrdiff_t kv_heads, n, d
        self.packed_rows = NULL
        self.q = Array(q, "q", "float32", 2)
        self.k = Array(k, "k", dtype, 3, heads=True)
        self.heads, d = self.q.size(0), self.q.size(1)
        kv_heads, n = self.k.size(0), self.k.size(1)
        if self.k.size(2) != d:
            raise ValueError(f"k must have rows of {d} values like q, not {self.k.size(2)}")
        if kv_heads == 0 or n == 0 or d == 0:
            raise ValueError("k must hold at least one token; the context is empty")
        if self.heads == 0 or self.heads % kv_heads:
            raise ValueError(f"q must hold heads that divide over {kv_heads} KV heads, "
                             f"not {self.heads}")
        self.rows.num_kv_heads, self.rows.n, self.rows.d = kv_heads, n, d
        self.rows.k, self.rows.k_head_stride = self.k.view.buf, self.k.head_stride()
        self.rows.v, self.rows.k_scale, self.rows.v_scale = NULL, NULL, NULL
        if v is not None:
            self.v = Array(v, "v", dtype, 3, heads=True)
            self.v.require_shape((kv_heads, n, d), "like k")
            self.rows.v, self.rows.v_head_stride = self.v.view.buf, self.v.head_stride()
        if k_scale is not None:
            self.k_scale = self.scale(k_scale, "k_scale")
            self.rows.k_scale = <const float *>self.k_scale.view.buf
            self.rows.k_scale_stride = self.k_scale.head_stride()
        if v_scale is not None:
            self.v_scale = self.scale(v_scale, "v_scale")
            self.rows.v_scale = <const float *>self.v_scale.view.buf
            self.rows.v_scale_stride = self.v_scale.head_stride()
        # No block or step is longer than the context: sizes beyond it mean the same.
        self.block_size = min(whole(block_size, "block_size", 1, PTRDIFF_MAX), n)
        self.n_probe = min(whole(n_probe, "n_probe", 1, PTRDIFF_MAX), n)
        self.n_blocks = block_count(n, self.block_size)
        require_finite_values(variant, self.q, self.q.view.buf)

    cdef int take_samples(self, samples, sample_scale) except -1:
        """The packed samples of the first full blocks, or None."""
        if samples is None:
            if sample_scale is not None:
                raise ValueError("sample_scale belongs to samples; pass both or none")
            return 0
        self.samples = PackedSamples(samples, sample_scale, "samples", "sample_scale",
                                     self.k_scale is not None)
        self.samples.require_fit(&self.rows, self.block_size, self.n_probe)
        self.packed_rows = &self.samples.rows
        return 0

    cdef Array scale(self, array, str name):
        cdef Array scale = Array(array, name, "float32", 2, heads=True)
        scale.require_shape((self.rows.num_kv_heads, self.rows.n), "to have one for each row of k")
        return scale

    cdef Array scores(self, array, str name):
        """The output array for the scores of every head and block."""
        cdef Array scores = Array(array, name, "float32", 2, True)
        scores.require_shape((self.heads, self.n_blocks), "to have one for each head and block")
        return scores

    cdef tuple inputs(self):
        cdef tuple samples = () if self.samples is None else self.samples.arrays()
        return tuple(array for array in (self.q, self.k, self.v, self.k_scale, self.v_scale,
                                         *samples) if array is not None)


cdef class Wanted:
    """How many blocks are chosen and how many of them by which importance: checked, as the part of
    a choice that goes in, which points to a private copy of the sums."""
    cdef choice c
    cdef Array importance
    cdef Private sums

    def __init__(self, Variant variant not None, ptrdiff_t n_blocks, importance_sums, k_blocks):
        cdef ptrdiff_t k = min(whole(k_blocks, "k_blocks", 1, PTRDIFF_MAX), 2 * n_blocks)
        self.c.n_blocks, self.c.k = n_blocks, min(k, n_blocks)
        self.c.importance, self.c.reserved = NULL, 0
        if importance_sums is not None:
            self.importance = Array(importance_sums, "importance_sums", "float32", 1)
            self.importance.require_shape((n_blocks,), "to have one for each block")
            self.sums = Private(self.importance)
            require_finite_values(variant, self.importance, self.sums.data)
            self.c.importance = <const float *>self.sums.data
            self.c.reserved = min((k + 1) // 2, n_blocks)

    cdef tuple inputs(self):
        return () if self.importance is None else (self.importance,)


cdef class Chosen:
    """The checked arrays of a choice, and the C struct that points to private copies of them."""
    cdef choice c
    cdef Wanted wanted
    cdef Array order, ids, recency, evicted
    cdef tuple results

    def __init__(self, Variant variant not None, ptrdiff_t heads, ptrdiff_t n_blocks,
                 importance_sums, k_blocks, order, ids, recency, evicted):
        self.wanted = Wanted(variant, n_blocks, importance_sums, k_blocks)
        self.c = self.wanted.c
        self.order = Array(order, "order", "int32", 2, True)
        self.ids = Array(ids, "ids", "int32", 2, True)
        self.recency = Array(recency, "recency", "int32", 1, True)
        self.evicted = Array(evicted, "evicted", "int32", 1, True)
        self.order.require_shape((heads, self.c.k), "to have k_blocks places for each head")
        self.ids.require_shape((heads, self.c.k), "to have k_blocks places for each head")
        self.recency.require_shape((heads,), "to have one for each head")
        self.evicted.require_shape((heads,), "to have one for each head")
        self.results = tuple(Private(output, True) for output in self.outputs())
        self.c.order, self.c.ids = <int32_t *>self.result(0), <int32_t *>self.result(1)
        self.c.recency, self.c.evicted = <int32_t *>self.result(2), <int32_t *>self.result(3)

    cdef void *result(self, int place):
        return (<Private>self.results[place]).data

    cdef void give(self):
        """Write the choice to the caller's arrays."""
        cdef Private result
        for result in self.results:
            result.give()

    cdef tuple outputs(self):
        return (self.order, self.ids, self.recency, self.evicted)

    cdef tuple inputs(self):
        return self.wanted.inputs()


cdef ptrdiff_t block_count(ptrdiff_t n, ptrdiff_t block_size) except -1:
    cdef ptrdiff_t count = (n - 1) // block_size + 1
    if count > INT32_MAX:
        raise ValueError(f"block_size {block_size} makes {count} blocks of {n} tokens; "
                         f"at most {INT32_MAX} can be numbered")
    return count


cdef int require_finite_values(Variant variant, Array array, const void *values) except -1:
    """ValueError naming the first place with NaN or infinity in the values of a contiguous float32
    array: those in it, or in a copy."""
    cdef ptrdiff_t count = array.view.len // array.view.itemsize, bad
    with nogil:
        bad = variant.c.selection.first_bad_value(<const float *>values, count)
    if bad >= 0:
        raise ValueError(f"{array.name} holds NaN or infinity at place {bad}")
    return 0


cdef int require_finite_scores(Variant variant, Array scores, const void *values) except -1:
    cdef ptrdiff_t count = scores.size(0) * scores.size(1), bad
    with nogil:
        bad = variant.c.selection.first_bad_value(<const float *>values, count)
    if bad >= 0:
        raise ValueError(f"the probe score of block {bad % scores.size(1)} is not finite; "
                         "a K row of it is bad.")
    return 0


@operation
def probe_scores(Variant variant not None, q, k, k_scale, block_size, n_probe, out):
    """Score every block of a context by the largest q . k over its sampled rows.

    q float32 [heads, d]; k float32 or int8 [kv_heads, n, d], views cache[:, :n] allowed, heads a
    multiple of kv_heads; k_scale float32 [kv_heads, n] with int8 rows, else None. out float32
    [heads, ceil(n / block_size)] receives the scores. ValueError for a score that is not finite
    (names the block), for q that is not, an empty context, shapes that disagree.
    """
    cdef ProbedRows given = ProbedRows(variant, q, k, None, k_scale, None, block_size, n_probe)
    cdef Array scores = given.scores(out, "out")
    cdef int threads = num_threads
    apart((scores,), given.inputs())
    with nogil:
        variant.c.selection.probe_scores(<const float *>given.q.view.buf, given.heads, &given.rows,
                                         given.packed_rows, given.block_size, given.n_probe,
                                         <float *>scores.view.buf, threads)
    require_finite_scores(variant, scores, scores.view.buf)


@operation
def importance_sums(Variant variant not None, importance, block_size, out):
    """Sum an importance array over each block, in float32, token after token.

    importance float32 [n], n at least 1; out float32 [ceil(n / block_size)] receives the sums.
    ValueError for a sum that is not finite, an empty array, shapes that disagree.
    """
    cdef Array values = Array(importance, "importance", "float32", 1)
    cdef Array sums = Array(out, "out", "float32", 1, True)
    cdef ptrdiff_t n = values.size(0), size, count
    cdef ptrdiff_t bad
    if n == 0:
        raise ValueError("importance must hold at least one token")
    size = min(whole(block_size, "block_size", 1, PTRDIFF_MAX), n)
    count = block_count(n, size)
    sums.require_shape((count,), "to have one for each block")
    apart((sums,), (values,))
    with nogil:
        variant.c.selection.importance_sums(<const float *>values.view.buf, n, size,
                                            <float *>sums.view.buf)
        bad = variant.c.selection.first_bad_value(<const float *>sums.view.buf, count)
    if bad >= 0:
        raise ValueError(f"importance holds NaN or infinity in block {bad}")


@operation
def select_blocks(Variant variant not None, probe, importance_sums, k_blocks, order, ids, recency,
                  evicted):
    """Choose the blocks of every head from their scores (course_lib.sparse.select_heads).

    probe float32 [heads, n_blocks]; importance_sums float32 [n_blocks] or None; k_blocks at least
    1. The results are int32: order [heads, min(k_blocks, n_blocks)] the blocks in order of choice,
    ids the same ascending, recency and evicted [heads] the last block where recency put it in and
    the block that it replaced, else -1. ValueError for NaN or infinity, no block, shapes that
    disagree.
    """
    cdef Array scores = Array(probe, "probe", "float32", 2)
    cdef ptrdiff_t heads = scores.size(0)
    cdef Chosen chosen
    cdef Private copied
    cdef int enough
    if scores.size(1) == 0:
        raise ValueError("probe must hold a score for at least one block")
    if scores.size(1) > INT32_MAX:
        raise ValueError(f"probe must hold at most {INT32_MAX} scores for each head, not "
                         f"{scores.size(1)}")
    chosen = Chosen(variant, heads, scores.size(1), importance_sums, k_blocks, order, ids, recency,
                    evicted)
    apart(chosen.outputs(), (scores, *chosen.inputs()))
    copied = Private(scores)
    require_finite_values(variant, scores, copied.data)
    with nogil:
        enough = variant.c.selection.select_blocks(<const float *>copied.data, heads, &chosen.c)
    if not enough:
        raise MemoryError("no memory to choose blocks")
    chosen.give()


@operation
def sparse_attention(Variant variant not None, q, k, v, k_scale, v_scale, importance_sums, k_blocks,
                     block_size, n_probe, shared, out, probe, order, ids, recency, evicted,
                     samples=None, sample_scale=None):
    """Probe every block, choose, and attend over the chosen ones, all heads of a layer.

    q float32 [heads, d]; k, v float32 or int8 [kv_heads, n, d], views cache[:, :n] allowed; scales
    float32 [kv_heads, n] with int8 rows, else None. The choice is select_blocks's, its results
    are written to probe, order, ids, recency, evicted; with `shared` true, the query heads of a
    KV head share one choice, by the largest of their probe scores. samples: None, or the rows that
    the probe reads of the first full blocks, copied together, [kv_heads, rows, d] of k's type, with
    sample_scale [kv_heads, rows] for int8: they are read instead of k's. out float32 [heads, d]
    receives two_pass attention over the chosen blocks. ValueError for what is not finite in q or in a row
    that is read, an empty context, shapes that disagree.
    """
    cdef ProbedRows given = ProbedRows(variant, q, k, v, k_scale, v_scale, block_size, n_probe)
    given.take_samples(samples, sample_scale)
    cdef Array output = Array(out, "out", "float32", 2, True)
    cdef Array scores = given.scores(probe, "probe")
    cdef Chosen chosen = Chosen(variant, given.heads, given.n_blocks, importance_sums, k_blocks,
                                order, ids, recency, evicted)
    cdef ptrdiff_t bad_token = -1
    cdef int threads = num_threads, share = <int>whole(shared, "shared", 0, 1)
    cdef sparse_status status
    cdef Private probed = Private(scores, True)
    if v is None:
        raise TypeError("v must be an array, not None")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale belong together; pass both with int8 rows")
    output.require_shape((given.heads, given.rows.d), "like q")
    apart((output, scores, *chosen.outputs()), (*given.inputs(), *chosen.inputs()))
    with nogil:
        status = variant.c.selection.sparse_attention(
            <const float *>given.q.view.buf, given.heads, &given.rows, given.packed_rows,
            given.block_size, given.n_probe, share, &chosen.c,
            <float *>probed.data, <float *>output.view.buf, threads, &bad_token)
    if status == SPARSE_BAD_PROBE:
        require_finite_scores(variant, scores, probed.data)
    elif status == SPARSE_BAD_SCORE:
        raise ValueError(f"the score of K row {bad_token} is not finite; the row or its scale "
                         "is bad.")
    elif status == SPARSE_BAD_OUTPUT:
        raise ValueError("the output is not finite; a V row or its scale is bad.")
    elif status == SPARSE_NO_MEMORY:
        raise MemoryError("no memory for sparse attention")
    chosen.give()
    probed.give()

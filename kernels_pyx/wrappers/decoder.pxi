# One token through all decoder layers.

cdef extern from "decoder.h":
    cdef struct decoder_layer:
        const float *input_gain
        const float *q_gain
        const float *k_gain
        const float *mlp_gain
        weight_matrix qkv, o, gate_up, down
        kv_rows rows, samples
        choice choice
        float *probe
    cdef struct decoder_token:
        float *x
        const float *cos
        const float *sin
        float eps
        ptrdiff_t heads
        rounding_rule rule
        int sparse
        ptrdiff_t block_size, n_probe
        double attention_seconds
    cdef enum decoder_status:
        DECODER_DONE
        DECODER_NOT_FINITE
        DECODER_NO_MEMORY
    cdef struct decoder_kernels:
        decoder_status layers(decoder_token *token, const decoder_layer *layers, ptrdiff_t count,
                              int threads) nogil


cdef tuple entries(object given, str name):
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of tuples of arrays, not {type(given).__name__} "
                        "in it or for it")
    return tuple(given)


cdef class DecoderLayers:
    """Checked arguments of decoder_layers, and the C structs that point into them."""
    cdef decoder_token token
    cdef decoder_layer *layers
    cdef ptrdiff_t count, kv_heads, d
    cdef Array x
    cdef list held

    def __cinit__(self, Variant variant not None, x, eps, cos, sin, heads, weights, caches, n,
                  rule_code):
        cdef Array cosines = Array(cos, "cos", "float32", 2)
        cdef Array sines = Array(sin, "sin", "float32", 2)
        cdef ptrdiff_t tokens = whole(n, "n", 0, PTRDIFF_MAX - 1) + 1, i
        self.x = Array(x, "x", "float32", 2, True)
        require_one_row(self.x)
        self.d = 2 * cosines.size(1)
        weights, caches = entries(weights, "weights"), entries(caches, "caches")
        self.count = len(weights)
        cosines.require_shape((1, cosines.size(1)), "of one token")
        sines.require_shape((1, cosines.size(1)), "like cos")
        if self.d == 0 or self.d % 16:
            raise ValueError(f"cos must be for heads of a multiple of 16 values, not {self.d}")
        if self.count == 0 or len(caches) != self.count:
            raise ValueError("weights and caches must hold one entry for each layer, at least one, "
                             f"not {self.count} and {len(caches)}")
        self.token.x = <float *>self.x.view.buf
        self.token.cos, self.token.sin = (<const float *>cosines.view.buf,
                                          <const float *>sines.view.buf)
        self.token.eps, self.token.sparse = at_least_0(eps), 0
        self.token.heads = whole(heads, "heads", 1, 1 << 20)
        self.token.rule = <rounding_rule>whole(rule_code, "rule_code", 0, NUM_RULES - 1)
        self.token.block_size = self.token.n_probe = 1
        apart((self.x,), (cosines, sines))
        self.held = [cosines, sines]
        self.layers = <decoder_layer *>PyMem_Malloc(<size_t>self.count * sizeof(decoder_layer))
        if self.layers == NULL:
            raise MemoryError("no memory for the layers of a token")
        for i in range(self.count):
            self.take_cache(&self.layers[i], entries(caches[i], "caches"), tokens, i == 0)
            self.take_weights(variant, &self.layers[i], entries(weights[i], "weights"))

    cdef int take_cache(self, decoder_layer *layer, tuple cache, ptrdiff_t n, bint first) except -1:
        """The rows of one layer: arrays of the cache's capacity, of which n tokens count."""
        cdef str dtype
        cdef Array k, v, scale
        if len(cache) != 4:
            raise ValueError("an entry of caches must be (k, v, k_scale, v_scale), not "
                             f"{len(cache)} arrays")
        dtype = "float32" if cache[2] is None else "int8"
        k, v = Array(cache[0], "caches.k", dtype, 3, True, True), Array(cache[1], "caches.v", dtype, 3, True, True)
        if first:
            self.kv_heads = k.size(0)
            if self.kv_heads == 0 or self.token.heads % self.kv_heads:
                raise ValueError(f"heads must divide over the {self.kv_heads} KV heads of caches, "
                                 f"not "
                                 f"{self.token.heads}")
        k.require_shape((self.kv_heads, k.size(1), self.d), "to fit cos and the first layer")
        v.require_shape((self.kv_heads, k.size(1), self.d), "like k")
        if k.size(1) < n:
            raise ValueError(f"caches.k must have room for {n} tokens, not {k.size(1)}")
        layer.rows.num_kv_heads, layer.rows.n, layer.rows.d = self.kv_heads, n, self.d
        layer.rows.k, layer.rows.k_head_stride = k.view.buf, k.head_stride()
        layer.rows.v, layer.rows.v_head_stride = v.view.buf, v.head_stride()
        layer.rows.k_scale = layer.rows.v_scale = NULL
        layer.rows.k_scale_stride = layer.rows.v_scale_stride = 0
        layer.samples.k, layer.probe = NULL, NULL
        apart((k, v), (self.x,))
        apart((k,), (v,))
        self.held += [k, v]
        if (cache[2] is None) != (cache[3] is None):
            raise ValueError("the scales of caches belong together; pass both with int8 rows")
        if cache[2] is not None:
            scale = self.scales(cache[2], "caches.k_scale", k)
            layer.rows.k_scale = <const float *>scale.view.buf
            layer.rows.k_scale_stride = scale.head_stride()
            scale = self.scales(cache[3], "caches.v_scale", k)
            layer.rows.v_scale = <const float *>scale.view.buf
            layer.rows.v_scale_stride = scale.head_stride()
        return 0

    cdef Array scales(self, object array, str name, Array k):
        cdef Array scale = Array(array, name, "float32", 2, True, True)
        scale.require_shape((self.kv_heads, k.size(1)), "to have one for each row of k")
        apart((scale,), (self.x, k))
        self.held.append(scale)
        return scale

    cdef int take_weights(self, Variant variant, decoder_layer *layer, tuple w) except -1:
        cdef ptrdiff_t hidden = self.x.size(1), width = self.token.heads * self.d, inner
        if len(w) != 12:
            raise ValueError(f"an entry of weights must be 12 arrays, not {len(w)}")
        layer.input_gain = self.gain(variant, w[0], "weights.input_gain", hidden)
        layer.q_gain = self.gain(variant, w[3], "weights.q_gain", self.d)
        layer.k_gain = self.gain(variant, w[4], "weights.k_gain", self.d)
        layer.mlp_gain = self.gain(variant, w[7], "weights.mlp_gain", hidden)
        if layer.input_gain == NULL or layer.mlp_gain == NULL:
            raise TypeError("the gains of weights must be arrays, not None")
        if width % 32:
            raise ValueError(f"all heads must have a multiple of 32 values together, not {width}")
        inner = inner_columns(w[10], w[11], "weights.down")
        layer.qkv = self.matrix(w[1], w[2], "weights.qkv", width + 2 * self.kv_heads * self.d, hidden)
        layer.o = self.matrix(w[5], w[6], "weights.o", hidden, width)
        layer.gate_up = self.matrix(w[8], w[9], "weights.gate_up", 2 * inner, hidden)
        layer.down = self.matrix(w[10], w[11], "weights.down", hidden, inner)
        return 0

    cdef tuple arrays(self):
        """All that is read and written beside x."""
        cdef list found = []
        for one in self.held:
            found += (<Weights>one).arrays() if isinstance(one, Weights) else (one,)
        return tuple(found)

    cdef const float *gain(self, Variant variant, object array, str name, ptrdiff_t d) except? NULL:
        cdef Array values
        if array is None:
            return NULL
        values = Array(array, name, "float32", 1)
        require_gain(variant, values, d)
        require_apart(self.x, values)
        self.held.append(values)
        return <const float *>values.view.buf

    cdef weight_matrix matrix(self, object codes, object scales, str name, ptrdiff_t rows,
                              ptrdiff_t cols) except *:
        cdef Weights weights = Weights(codes, scales, name, rows, cols)
        apart((self.x,), weights.arrays())
        self.held.append(weights)
        return weights.c

    def __dealloc__(self):
        PyMem_Free(self.layers)


cdef class DecoderChoices:
    """The blocks that every layer of a token chooses, and where they are written."""
    cdef Array order, ids, recency, evicted, probe
    cdef tuple results
    cdef list held

    def __init__(self, Variant variant not None, DecoderLayers to not None, importance_sums,
                 k_blocks, block_size, n_probe, samples, probe, order, ids, recency, evicted):
        cdef ptrdiff_t n = to.layers.rows.n, heads = to.token.heads, count = to.count, blocks, i
        cdef Wanted wanted
        cdef decoder_layer *layer
        cdef choice choice
        self.held = []
        to.token.sparse = 1
        to.token.block_size = min(whole(block_size, "block_size", 1, PTRDIFF_MAX), n)
        to.token.n_probe = min(whole(n_probe, "n_probe", 1, PTRDIFF_MAX), n)
        blocks = block_count(n, to.token.block_size)
        wanted = Wanted(variant, blocks, importance_sums, k_blocks)
        choice = wanted.c
        self.held.append(wanted)
        self.probe = Array(probe, "probe", "float32", 3, True)
        self.probe.require_shape((count, heads, blocks), "to have a score for each block")
        self.order = self.places(order, "order", (count, heads, choice.k))
        self.ids = self.places(ids, "ids", (count, heads, choice.k))
        self.recency = self.places(recency, "recency", (count, heads))
        self.evicted = self.places(evicted, "evicted", (count, heads))
        outputs = (self.probe, self.order, self.ids, self.recency, self.evicted)
        apart(outputs, (to.x, *wanted.inputs(), *to.arrays()))
        self.results = tuple([Private(output, True) for output in outputs])
        samples = entries(samples, "samples")
        if len(samples) not in (0, count):
            raise ValueError(f"samples must be empty or hold one entry for each of the {count} "
                             f"layers, not {len(samples)}")
        for i in range(count):
            layer = &to.layers[i]
            layer.probe = <float *>self.result(0) + i * heads * blocks
            layer.choice = choice
            layer.choice.order = <int32_t *>self.result(1) + i * heads * choice.k
            layer.choice.ids = <int32_t *>self.result(2) + i * heads * choice.k
            layer.choice.recency = <int32_t *>self.result(3) + i * heads
            layer.choice.evicted = <int32_t *>self.result(4) + i * heads
            if samples:
                self.take_samples(to, layer, entries(samples[i], "samples"))

    cdef int take_samples(self, DecoderLayers to, decoder_layer *layer, tuple given) except -1:
        """The packed samples of a layer's first full blocks; (None, None) for none."""
        cdef PackedSamples samples
        if len(given) != 2:
            raise ValueError(f"an entry of samples must be (rows, scale), not {len(given)} arrays")
        if given[0] is None:
            return 0
        samples = PackedSamples(given[0], given[1], "samples.rows", "samples.scale",
                                layer.rows.k_scale != NULL)
        samples.require_fit(&layer.rows, to.token.block_size, to.token.n_probe)
        layer.samples = samples.rows
        self.held.append(samples)
        return 0

    cdef Array places(self, object array, str name, tuple shape):
        cdef Array output = Array(array, name, "int32", len(shape), True)
        output.require_shape(shape, "to have places for each layer and head")
        return output

    cdef void *result(self, int place):
        return (<Private>self.results[place]).data

    cdef void give(self):
        cdef Private result
        for result in self.results:
            result.give()


@operation
def decoder_layers(Variant variant not None, x, eps, cos, sin, heads, weights, caches, n, rule_code,
                   importance_sums, k_blocks, block_size, n_probe, samples, probe, order, ids,
                   recency, evicted):
    """Take one token through all decoder layers: norm, q k v, cache, attention, output, SwiGLU.

    x float32 [1, hidden], in and out; eps as in rms_norm; cos and sin float32 [1, d/2] of its
    position; heads, of the queries. weights: for each layer (input_gain, qkv, qkv_scales, q_gain,
    k_gain, o, o_scales, mlp_gain, gate_up, gate_up_scales, down, down_scales), as in
    attention_input, attention_output and swiglu. caches: for each layer (k, v, k_scale, v_scale),
    arrays [kv_heads, capacity, d] and [kv_heads, capacity] of which no two share memory: n tokens
    are there, the new one is written behind them, int8 rows by the rule `rule_code`. k_blocks None
    reads all rows, by two_pass; the arguments after it are then not looked at. A number chooses so
    many blocks as sparse_attention does; its results have an axis for the layers before the others,
    and samples is empty or has for each layer (rows, scale), of which the rows may be None.

    Returns (whether all numbers were finite, seconds of attention). If not, x and the new rows are
    undefined, nothing is written to the results of the choice, and the operations called one by one
    say what is wrong. The bits are theirs. ValueError for shapes that disagree and for outputs that
    share memory, TypeError for a wrong dtype.
    """
    cdef DecoderLayers given = DecoderLayers(variant, x, eps, cos, sin, heads, weights, caches, n,
                                             rule_code)
    cdef DecoderChoices chosen = None
    cdef decoder_status status
    cdef int threads = num_threads
    if k_blocks is not None:
        chosen = DecoderChoices(variant, given, importance_sums, k_blocks, block_size, n_probe,
                                samples, probe, order, ids, recency, evicted)
    with nogil:
        status = variant.c.decoder.layers(&given.token, given.layers, given.count, threads)
    if status == DECODER_NO_MEMORY:
        raise MemoryError("no memory for the layers of a token")
    if chosen is not None and status == DECODER_DONE:
        chosen.give()
    return status == DECODER_DONE, given.token.attention_seconds

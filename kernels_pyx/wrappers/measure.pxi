# What this machine can do at most: ./course bench states every kernel beside it.

cdef extern from "measure.h":
    cdef struct measure_kernels:
        uint32_t sum_words(const uint32_t *x, ptrdiff_t count, int threads) nogil
        uint32_t sum_blocks(const uint32_t *x, const int64_t *first, ptrdiff_t blocks,
                            ptrdiff_t size, int threads) nogil
        double float_operations(ptrdiff_t rounds, int threads) nogil
        double int8_operations(ptrdiff_t rounds, int threads) nogil

MAX_ROUNDS = 2**24
"""A tenth of a second, or a few where each multiply-add is a call of the C library."""


@operation
def read_words(Variant variant not None, words):
    """Read int32 words in order and return their sum modulo 2**32.

    words int32 [n], read-only allowed. TypeError for another dtype, ValueError for another layout.
    """
    cdef Array checked = Array(words, "words", "int32", 1)
    cdef const uint32_t *x = <const uint32_t *>checked.view.buf
    cdef ptrdiff_t count = checked.size(0)
    cdef uint32_t total
    cdef int threads = num_threads
    with nogil:
        total = variant.c.measure.sum_words(x, count, threads)
    return total


@operation
def read_blocks(Variant variant not None, words, first, size):
    """Read blocks of `size` words, each from word first[i] on; return their sum modulo 2**32.

    words int32 [n], first int64 [blocks]. ValueError for a block that is not inside words.
    """
    cdef Array checked = Array(words, "words", "int32", 1)
    cdef Array starts = Array(first, "first", "int64", 1)
    cdef const uint32_t *x = <const uint32_t *>checked.view.buf
    cdef Private copied = Private(starts)
    cdef const int64_t *start = <const int64_t *>copied.data
    cdef ptrdiff_t count = checked.size(0), blocks = starts.size(0), i
    cdef uint32_t total
    cdef int threads = num_threads
    cdef ptrdiff_t length = whole(size, "size", 0, count)
    for i in range(blocks):
        if not 0 <= start[i] <= count - length:
            raise ValueError(f"first[{i}] = {start[i]} leaves no {length} of {count} words")
    with nogil:
        total = variant.c.measure.sum_blocks(x, start, blocks, length, threads)
    return total


@operation
def compute_float(Variant variant not None, rounds):
    """Do rounds of independent float32 multiply-adds on every thread; return how many operations
    (two a multiply-add) those were. ValueError unless rounds is 0 to MAX_ROUNDS."""
    cdef double operations
    cdef int threads = num_threads
    cdef ptrdiff_t count = whole(rounds, "rounds", 0, MAX_ROUNDS)
    with nogil:
        operations = variant.c.measure.float_operations(count, threads)
    return operations


@operation
def compute_int8(Variant variant not None, rounds):
    """Do rounds of independent int8 products summed in int32 on every thread, by the instructions
    that the variant's weight products use; returns and raises as compute_float."""
    cdef double operations
    cdef int threads = num_threads
    cdef ptrdiff_t count = whole(rounds, "rounds", 0, MAX_ROUNDS)
    with nogil:
        operations = variant.c.measure.int8_operations(count, threads)
    return operations

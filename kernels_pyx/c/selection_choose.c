/* The choice of blocks from their scores. */

/* A block and its score as one whole number: the larger number is the block to take first. Floats
 * are ordered like their bits, the negative ones in reverse; below the score stands the inverted
 * index, so that of equal scores the lower index is larger and no two blocks are equal. */
static uint64_t block_key(float score, ptrdiff_t block)
{
    uint32_t bits;
    score += 0.0f;  /* -0 becomes 0: they are equal */
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~(uint32_t)block;
}

static int32_t block_of_key(uint64_t key)
{
    return (int32_t)~(uint32_t)key;
}

/* Put `key` into the place `i` of a heap whose smallest key lies at place 0, or below it. */
static void sift_down(uint64_t *heap, ptrdiff_t count, ptrdiff_t i, uint64_t key)
{
    for (;;) {
        ptrdiff_t child = 2 * i + 1;
        if (child >= count)
            break;
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (key <= heap[child])
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

/* Write the `count` best blocks by score to `order`, from the best down; blocks that `taken` marks
 * are passed over (NULL: none). A heap holds the best so far, its worst on top: most blocks are
 * turned away by one comparison, and no list of all blocks is ever sorted. */
static void best_blocks(const float *scores, ptrdiff_t n_blocks, const char *taken,
                        ptrdiff_t count, uint64_t *heap, int32_t *order)
{
    ptrdiff_t held = 0;
    float worst = -INFINITY;  /* of the best so far, when there are enough of them */
    if (count == 0)
        return;
    for (ptrdiff_t b = 0; b < n_blocks; b++) {
        if (scores[b] <= worst || (taken && taken[b]))
            continue;
        uint64_t key = block_key(scores[b], b);
        if (held < count) {
            heap[held++] = key;
            if (held < count)
                continue;
            for (ptrdiff_t i = count / 2; i-- > 0;)
                sift_down(heap, count, i, heap[i]);
        } else {
            sift_down(heap, count, 0, key);  /* of equals, the one that is there stays */
        }
        worst = scores[block_of_key(heap[0])];
    }
    for (ptrdiff_t place = count; place-- > 0;) {
        order[place] = block_of_key(heap[0]);
        sift_down(heap, place, 0, heap[place]);
    }
}

/* The last block is always read if a block chosen by probe can make room for it: the one with the
 * lowest score, of equals the earliest chosen. */
static void put_in_last_block(const float *scores, const struct choice *choice, int32_t *order,
                              int32_t *recency, int32_t *evicted)
{
    int32_t last = (int32_t)(choice->n_blocks - 1);
    ptrdiff_t slot = choice->reserved;
    *recency = *evicted = -1;
    if (choice->k == choice->n_blocks || choice->reserved == choice->k)
        return;
    for (ptrdiff_t place = 0; place < choice->k; place++)
        if (order[place] == last)
            return;
    for (ptrdiff_t place = slot + 1; place < choice->k; place++)
        if (scores[order[place]] < scores[order[slot]])
            slot = place;
    *recency = last;
    *evicted = order[slot];
    order[slot] = last;
}

/* Scratch memory of one choice, a heap of k keys and a mark for every block; and the memory of the
 * blocks reserved by importance. Both in whole cache lines, so that what follows is aligned. */
static size_t choice_bytes(const struct choice *choice)
{
    return ((size_t)choice->k * sizeof(uint64_t) + (size_t)choice->n_blocks + 63) / 64 * 64;
}

static size_t reserved_bytes(const struct choice *choice)
{
    return ((size_t)choice->reserved * sizeof(int32_t) + 63) / 64 * 64;
}

/* Choose the blocks of one head. `first`: the blocks reserved by importance, in their order. */
static void choose_blocks(const float *scores, const struct choice *choice, const int32_t *first,
                          ptrdiff_t head, void *scratch)
{
    uint64_t *heap = scratch;
    char *mark = (char *)(heap + choice->k);
    ptrdiff_t k = choice->k, reserved = choice->reserved;
    int32_t *order = choice->order + head * k, *ids = choice->ids + head * k;
    memset(mark, 0, (size_t)choice->n_blocks);
    for (ptrdiff_t i = 0; i < reserved; i++) {
        order[i] = first[i];
        mark[first[i]] = 1;
    }
    best_blocks(scores, choice->n_blocks, mark, k - reserved, heap, order + reserved);
    put_in_last_block(scores, choice, order, &choice->recency[head], &choice->evicted[head]);
    memset(mark, 0, (size_t)choice->n_blocks);
    for (ptrdiff_t i = 0; i < k; i++)
        mark[order[i]] = 1;
    for (int32_t b = 0, i = 0; b < choice->n_blocks; b++)
        if (mark[b])
            ids[i++] = b;
}

/* Memory for `threads` choices at once, and before it the blocks that importance reserves, which
 * are the same for all heads; NULL if there is none. To be freed. */
static int32_t *start_choices(const struct choice *choice, int threads)
{
    size_t reserved = reserved_bytes(choice);
    char *memory = malloc(reserved + (size_t)threads * choice_bytes(choice));
    if (memory && choice->reserved)
        best_blocks(choice->importance, choice->n_blocks, NULL, choice->reserved,
                    (uint64_t *)(memory + reserved), (int32_t *)memory);
    return (int32_t *)memory;
}

static int select_blocks(const float *scores, ptrdiff_t heads, const struct choice *choice)
{
    int32_t *first = start_choices(choice, 1);
    if (!first)
        return 0;
    for (ptrdiff_t h = 0; h < heads; h++)
        choose_blocks(scores + h * choice->n_blocks, choice, first, h,
                      (char *)first + reserved_bytes(choice));
    free(first);
    return 1;
}

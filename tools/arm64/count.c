/* A plugin of qemu's user-mode emulation: counts the instructions of a program, the bytes that it
 * loads and stores, and how often each of its basic blocks ran.
 *
 *     gcc -shared -fPIC -DQEMU_PLUGIN_VERSION=1 -o count.so count.c
 *     qemu-aarch64 -plugin ./count.so -d plugin PROGRAM
 *
 * prints "total INSTRUCTIONS LOADED STORED", then "block ADDRESS INSTRUCTIONS RUNS" for the blocks
 * in which most instructions ran. For one thread only. With ./count.so,totals=on only the first line,
 * for programs of more blocks than it has room for, such as Python.
 *
 * Distributions rarely package qemu's own qemu-plugin.h; what is declared here is the part of that
 * interface which this file uses and which has stayed the same since its first version. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
typedef uint32_t qemu_plugin_meminfo_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info_t;
enum { NO_REGISTERS = 0, READS_AND_WRITES = 3, MAX_BLOCKS = 1 << 16, SHOWN = 16 };

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t,
                                           void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, void (*)(unsigned, void *), int,
                                          void *);
void qemu_plugin_register_vcpu_mem_cb(
    struct qemu_plugin_insn *, void (*)(unsigned, qemu_plugin_meminfo_t, uint64_t, void *), int,
    int, void *);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
unsigned qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t);
bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t);
void qemu_plugin_outs(const char *);

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int qemu_plugin_version = QEMU_PLUGIN_VERSION;

/* A block can be translated more than once; every translation is counted under its address. */
static struct block {
    uint64_t address, instructions, runs;
} blocks[MAX_BLOCKS];
static size_t num_blocks;
static uint64_t loaded, stored, executed;
static bool totals_only;

static void on_run(unsigned cpu, void *block)
{
    (void)cpu;
    ((struct block *)block)->runs++;
}

static void on_run_of(unsigned cpu, void *instructions)
{
    (void)cpu;
    executed += (uintptr_t)instructions;
}

static void on_memory(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void *data)
{
    (void)cpu, (void)address, (void)data;
    uint64_t bytes = UINT64_C(1) << qemu_plugin_mem_size_shift(info);
    if (qemu_plugin_mem_is_store(info))
        stored += bytes;
    else
        loaded += bytes;
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    uint64_t address = qemu_plugin_tb_vaddr(tb), count = qemu_plugin_tb_n_insns(tb);
    size_t i = 0;
    for (size_t n = 0; n < count; n++)
        qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(tb, n), on_memory, NO_REGISTERS,
                                         READS_AND_WRITES, NULL);
    if (totals_only) {
        qemu_plugin_register_vcpu_tb_exec_cb(tb, on_run_of, NO_REGISTERS,
                                             (void *)(uintptr_t)count);
        return;
    }
    while (i < num_blocks && (blocks[i].address != address || blocks[i].instructions != count))
        i++;
    if (i == MAX_BLOCKS)
        abort();
    if (i == num_blocks)
        blocks[num_blocks++] = (struct block){address, count, 0};
    qemu_plugin_register_vcpu_tb_exec_cb(tb, on_run, NO_REGISTERS, &blocks[i]);
}

static int by_instructions_run(const void *a, const void *b)
{
    const struct block *x = a, *y = b;
    uint64_t nx = x->instructions * x->runs, ny = y->instructions * y->runs;
    return (nx < ny) - (nx > ny);
}

static void on_exit_of_program(qemu_plugin_id_t id, void *data)
{
    (void)id, (void)data;
    char line[128];
    uint64_t instructions = executed;
    for (size_t i = 0; i < num_blocks; i++)
        instructions += blocks[i].instructions * blocks[i].runs;
    snprintf(line, sizeof line, "total %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", instructions,
             loaded, stored);
    qemu_plugin_outs(line);
    qsort(blocks, num_blocks, sizeof *blocks, by_instructions_run);
    for (size_t i = 0; i < num_blocks && i < SHOWN; i++) {
        snprintf(line, sizeof line, "block 0x%" PRIx64 " %" PRIu64 " %" PRIu64 "\n",
                 blocks[i].address, blocks[i].instructions, blocks[i].runs);
        qemu_plugin_outs(line);
    }
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const struct qemu_info_t *info, int argc,
                                 char **argv)
{
    (void)info;
    totals_only = argc > 0 && !strcmp(argv[0], "totals=on");
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    qemu_plugin_register_atexit_cb(id, on_exit_of_program, NULL);
    return 0;
}

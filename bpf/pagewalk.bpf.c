/* Reads the page tables of a process on x86-64, whose accessed bits show which mapped pages were touched.
 *
 * User space runs the programs to take a sample. Nothing is attached, so there is no cost between samples. */
#include "kernel.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#define TABLES 512		/* page tables copied per call; each maps 2 MiB of addresses */
#define PROBES 8192		/* pages looked up per call */
#define PRESENT 1ULL
#define HUGE 0x80ULL
#define ADDRESS 0x000ffffffffff000ULL

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, TABLES);
	__type(key, u32);
	__type(value, u64[512]);
} tables SEC(".maps");

/* The entries that point to the tables; 0 if nothing is mapped. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, TABLES);
	__type(key, u32);
	__type(value, u64);
} entries SEC(".maps");

/* Addresses for `probe`, which replaces them by the entries of their pages. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, PROBES);
	__type(key, u32);
	__type(value, u64);
} probes SEC(".maps");

struct place {
	u64 address;	/* in the process; for find_memory: of memory that the process has filled with `mark` */
	u64 memory;	/* where the kernel maps all physical memory */
	u64 frame;	/* for find_memory: the physical address of that memory */
	u64 mark;
	u32 pid;
	u32 count;
};
struct walk { u64 root, memory, address; };

static __always_inline u64 entry(u64 table, u64 address, u32 shift)
{
	u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (void *)(table + (address >> shift & 511) * 8));
	return value;
}

/* The entry that points to the page table of an address, or to its huge page; 0 if nothing is mapped. */
static __always_inline u64 table_entry(struct walk *walk, u64 address)
{
	u64 found = entry(walk->root, address, 39);

	if (!(found & PRESENT))
		return 0;
	found = entry(walk->memory + (found & ADDRESS), address, 30);
	if (!(found & PRESENT) || found & HUGE)
		return 0;
	found = entry(walk->memory + (found & ADDRESS), address, 21);
	return found & PRESENT ? found : 0;
}

static long copy_table(u32 index, struct walk *walk)
{
	u64 address = walk->address + ((u64)index << 21), found;
	u64 *where = bpf_map_lookup_elem(&entries, &index);
	void *table = bpf_map_lookup_elem(&tables, &index);

	if (!where || !table)
		return 1;
	*where = 0;
	found = table_entry(walk, address);
	if (!found)
		return 0;
	if (!(found & HUGE) && bpf_probe_read_kernel(table, 4096, (void *)(walk->memory + (found & ADDRESS))))
		return 0;
	*where = found;
	return 0;
}

static long probe_page(u32 index, struct walk *walk)
{
	u64 *where = bpf_map_lookup_elem(&probes, &index), address, found;

	if (!where)
		return 1;
	address = *where;
	found = table_entry(walk, address);
	if (found && !(found & HUGE))
		found = entry(walk->memory + (found & ADDRESS), address, 12);
	*where = found;
	return 0;
}

/* The address of the top page table of a process; 0 if there is no such process. */
static __always_inline u64 top_table(u32 pid)
{
	struct task_struct *task = find_thread(pid);

	return task ? (u64)BPF_CORE_READ(task, mm, pgd) : 0;
}

static long try_memory(u32 index, struct place *place)
{
	u64 memory = place->memory - ((u64)index << 30), head = 0, tail = 0;

	if (bpf_probe_read_kernel(&head, sizeof(head), (void *)(memory + place->frame)) || head != place->mark)
		return 0;
	bpf_probe_read_kernel(&tail, sizeof(tail), (void *)(memory + place->frame + 4088));
	if (tail != ~place->mark)
		return 0;
	place->count = index;
	return 1;
}

/* Finds where the kernel maps all physical memory: the marked page is visible a whole number of GiB below the top table. */
SEC("syscall")
int find_memory(struct place *place)
{
	u64 root = top_table(place->pid);
	struct place attempt = *place;

	attempt.memory = root & ~((1ULL << 30) - 1);
	attempt.count = ~0U;
	if (!root)
		return 1;
	bpf_loop(8192, try_memory, &attempt, 0);
	if (attempt.count == ~0U)
		return 2;
	place->memory = attempt.memory - ((u64)attempt.count << 30);
	return 0;
}

/* Copies the page tables of `count` times 2 MiB from `address` on; 1 if there is no such process. */
SEC("syscall")
int copy_tables(struct place *place)
{
	struct walk walk = { .address = place->address, .memory = place->memory, .root = top_table(place->pid) };

	if (!walk.root)
		return 1;
	bpf_loop(place->count > TABLES ? TABLES : place->count, copy_table, &walk, 0);
	return 0;
}

/* Looks up the first `count` pages of `probes`; 1 if there is no such process. */
SEC("syscall")
int probe(struct place *place)
{
	struct walk walk = { .memory = place->memory, .root = top_table(place->pid) };

	if (!walk.root)
		return 1;
	bpf_loop(place->count > PROBES ? PROBES : place->count, probe_page, &walk, 0);
	return 0;
}

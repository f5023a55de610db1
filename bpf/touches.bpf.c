/* Reports touches of extents to a mount in place (llmcache/mount/backends/touches.py).
 *
 * User space lists the files and their extents. A touch of an extent is reported at once, and repeated after `quiet_ns` at
 * the earliest. A client at full speed causes a few thousand records a second, and hits of mapped pages cause none. */
#include "kernel.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#define PLACES (1 << 19)	/* extents of all files together */
#define RUNS (1 << 14)		/* for all files together */
#define MOST 16			/* extents that one event may touch: a batch of folios of a read */
#define MISS 1			/* the page was not cached, or it triggers readahead */
#define FAULT 2			/* through a mapping */
#define PRESENT 1		/* in a fault's error code: the page was mapped, but without this permission */

struct config { u64 quiet_ns, gather_ns; u32 page_shift, spare; };
const volatile struct config config = {};

/* `first`: the index of the file's first extent. Only every `step`th extent is reported. For an MoE model, expert slices
 * (`runs`) are reported as well, numbered after the extents. */
struct watched { u32 id, first, count, extent_pages, step, first_run, runs; };
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct file_key);
	__type(value, struct watched);
} files SEC(".maps");

/* Contiguous slices of one size, sorted by position. */
struct run { u64 first_byte, slice_bytes; u32 count, first; };
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RUNS);
	__type(key, u32);
	__type(value, struct run);
} runs SEC(".maps");

/* When a touch of each extent was last reported; the lowest bit is set for a miss. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PLACES);
	__type(key, u32);
	__type(value, u64);
} reported SEC(".maps");

struct touch {
	u64 t_ns;
	u32 id, extent, pid, flags;
};
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} ring SEC(".maps");

/* Processes that have touched a watched file, by tgid: their pid in the daemon's namespace, and their start time, because
 * the kernel reuses tgids. */
struct program { u64 started_ns; u32 pid, spare; };
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, u32);
	__type(value, struct program);
} programs SEC(".maps");

/* Pages added to the page cache, by the number of the file: read for clients, and read for the daemon and its helper. */
struct added { u64 client_pages, own_pages; };
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, u32);
	__type(value, struct added);
} added_pages SEC(".maps");

struct own { u32 tgid, spare; u64 lost, woken_ns; };
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct own);
} own SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct viewer);
} viewers SEC(".maps");

/* The mount's daemon and its helper read pages too; these reads are not touches. */
static __always_inline int is_own(struct own *mine)
{
	struct task_struct *task = bpf_get_current_task_btf();

	return task->tgid == mine->tgid || task->real_parent->tgid == mine->tgid;
}

/* Nearly all touches repeat within `quiet_ns`, at the full speed of the page cache, so this check comes first. */
static __always_inline void report_touch(struct watched *file, u32 extent, u64 now, u32 flags)
{
	struct touch touch = { .t_ns = now, .id = file->id, .extent = extent, .flags = flags };
	u32 place = file->first + extent, zero = 0, tgid;
	u64 *last = bpf_map_lookup_elem(&reported, &place);
	struct program *known, program = {};
	struct viewer *viewer;
	struct own *mine;
	int wakes;

	if (!last || (now - *last < config.quiet_ns && (*last & MISS || !(flags & MISS))))
		return;
	mine = bpf_map_lookup_elem(&own, &zero);
	viewer = bpf_map_lookup_elem(&viewers, &zero);
	if (!mine || !viewer || is_own(mine))
		return;
	*last = (now & ~1ULL) | (flags & MISS);
	if (file->step > 1 && extent < file->count && extent % file->step)
		return;
	tgid = bpf_get_current_pid_tgid() >> 32;
	known = bpf_map_lookup_elem(&programs, &tgid);
	program.started_ns = bpf_get_current_task_btf()->group_leader->start_time;
	if (known && known->started_ns == program.started_ns) {
		touch.pid = known->pid;
	} else {
		touch.pid = program.pid = visible_pid((void *)bpf_get_current_task(), viewer);
		bpf_map_update_elem(&programs, &tgid, &program, 0);
	}
	/* A wake-up costs the client microseconds, so only misses cause one at once; hits are collected for a while. */
	wakes = flags & MISS || now - mine->woken_ns > config.gather_ns;
	if (wakes)
		mine->woken_ns = now;
	if (bpf_ringbuf_output(&ring, &touch, sizeof(touch), wakes ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&mine->lost, 1);
}

#define NO_SLICE (~0U)

/* The slice that contains both bytes, or NO_SLICE. */
static __always_inline u32 slice_of(struct watched *file, u64 begin, u64 end)
{
	u32 low = file->first_run, high = file->first_run + file->runs;
	struct run *run;
	u64 number;

	for (int step = 0; step < 15 && low < high; step++) {
		u32 middle = (low + high) / 2;

		run = bpf_map_lookup_elem(&runs, &middle);
		if (!run)
			return NO_SLICE;
		if (run->first_byte <= begin)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == file->first_run)
		return NO_SLICE;
	low--;
	run = bpf_map_lookup_elem(&runs, &low);
	if (!run || !run->slice_bytes)
		return NO_SLICE;
	number = (begin - run->first_byte) / run->slice_bytes;
	if (number >= run->count || (end - run->first_byte) / run->slice_bytes != number)
		return NO_SLICE;
	return run->first + number;
}

static __always_inline int touched(struct inode *inode, u64 first, u64 last, u32 flags)
{
	struct file_key key = file_key(inode);
	struct watched *file = bpf_map_lookup_elem(&files, &key);
	u64 now;

	if (!file || !file->extent_pages)
		return 0;
	now = bpf_ktime_get_ns();
	if (file->runs) {
		/* Pages that the kernel reads or maps around a fault may reach into the next slice, which is not a touch of
		 * it. */
		u32 slice = slice_of(file, first << config.page_shift, ((last + 1) << config.page_shift) - 1);

		if (slice != NO_SLICE) {
			report_touch(file, file->count + slice, now, flags);
			return 0;
		}
	}
	first /= file->extent_pages;
	last /= file->extent_pages;
	for (int index = 0; index < MOST && first + index <= last && first + index < file->count; index++)
		report_touch(file, first + index, now, flags);
	return 0;
}

SEC("tp_btf/mm_filemap_get_pages")
int BPF_PROG(read_pages, struct address_space *mapping, unsigned long first, unsigned long last)
{
	return touched(mapping->host, first, last, 0);
}

SEC("tp_btf/mm_filemap_fault")
int BPF_PROG(fault_page, struct address_space *mapping, unsigned long page)
{
	return touched(mapping->host, page, page, MISS | FAULT);
}

SEC("tp_btf/mm_filemap_map_pages")
int BPF_PROG(map_around, struct address_space *mapping, unsigned long first, unsigned long last)
{
	return touched(mapping->host, first, last, FAULT);
}

/* Before Linux 6.12, the page cache has no tracepoints at accesses; these are the functions that have them since then. A
 * request for absent pages finds no folio before the kernel has begun to read them. */
SEC("fexit/filemap_get_read_batch")
int BPF_PROG(batch_found, struct address_space *mapping, unsigned long first, unsigned long last, struct folio_batch *batch)
{
	return batch->nr ? touched(mapping->host, first, last, 0) : 0;
}

SEC("fentry/filemap_fault")
int BPF_PROG(fault_begun, struct vm_fault *fault)
{
	return touched(faulting_file(fault)->host, fault->pgoff, fault->pgoff, MISS | FAULT);
}

/* Also maps folios as large as a huge page. Without VM_FAULT_NOPAGE, `fault_begun` follows. */
SEC("fexit/filemap_map_pages")
int BPF_PROG(map_returned, struct vm_fault *fault, unsigned long first, unsigned long last, u32 result)
{
	return result & VM_FAULT_NOPAGE ? touched(faulting_file(fault)->host, first, last, FAULT) : 0;
}

/* The kernel reads a folio for a client or for the daemon. */
SEC("tp_btf/mm_filemap_add_to_page_cache")
int BPF_PROG(add_folio, struct folio *folio)
{
	struct file_key key = file_key(folio->mapping->host);
	struct watched *file = bpf_map_lookup_elem(&files, &key);
	struct added *added;
	struct own *mine;
	u32 zero = 0;

	if (!file)
		return 0;
	added = bpf_map_lookup_elem(&added_pages, &file->id);
	mine = bpf_map_lookup_elem(&own, &zero);
	if (!added || !mine)
		return 0;
	__sync_fetch_and_add(is_own(mine) ? &added->own_pages : &added->client_pages, folio_pages(folio));
	return 0;
}

static long take_page(struct task_struct *task, struct vm_area_struct *vma, u64 *address)
{
	struct file *file = vma->vm_file;
	u64 page;

	if (!file)
		return 0;
	page = vma->vm_pgoff + ((*address - vma->vm_start) >> config.page_shift);
	touched(BPF_CORE_READ(file, f_mapping, host), page, page, FAULT);
	return 0;
}

/* A folio as large as a huge page is mapped at once, without another event, so page faults of known programs are recorded as
 * well. */
static __always_inline int take_fault(u64 address, u64 error_code)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;

	if (!(error_code & PRESENT) && bpf_map_lookup_elem(&programs, &tgid))
		bpf_find_vma(bpf_get_current_task_btf(), address, take_page, &address, 0);
	return 0;
}

SEC("tp_btf/page_fault_user")
int BPF_PROG(fault, unsigned long address, struct pt_regs *regs, unsigned long error_code)
{
	return take_fault(address, error_code);
}

/* In a system call that accesses mapped memory. */
SEC("tp_btf/page_fault_kernel")
int BPF_PROG(fault_in_call, unsigned long address, struct pt_regs *regs, unsigned long error_code)
{
	return take_fault(address, error_code);
}

/* For kernels without tracepoints at page faults (arm64): the function that handles all faults, including those in system
 * calls. */
SEC("fentry/handle_mm_fault")
int BPF_PROG(fault_handled, struct vm_area_struct *vma, unsigned long address)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	u64 where = address;

	if (bpf_map_lookup_elem(&programs, &tgid))
		take_page(bpf_get_current_task_btf(), vma, &where);
	return 0;
}

/* Run by the daemon: from now on, touches by it and its children are not reported. */
SEC("syscall")
int begin(void *context)
{
	struct task_struct *me = (void *)bpf_get_current_task();
	u32 zero = 0;
	struct own *mine = bpf_map_lookup_elem(&own, &zero);
	struct viewer *viewer = bpf_map_lookup_elem(&viewers, &zero);

	if (!mine || !viewer)
		return 1;
	mine->tgid = BPF_CORE_READ(me, tgid);
	set_viewer(viewer, me);
	return 0;
}

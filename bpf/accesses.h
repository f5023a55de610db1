/* Turns events of recorded threads into runs of read requests and fills. */
#ifndef LLMCACHE_ACCESSES_H
#define LLMCACHE_ACCESSES_H

#include "threads.h"

/* Files that were accessed. Evictions and block requests of these files are recorded for all processes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct file_key);
	__type(value, u32);
} files SEC(".maps");

static __always_inline bool is_file(struct file_key *key, struct record *record)
{
	return key->inode == record->inode && key->dev == record->dev;
}

static __always_inline void add_file(struct thread *thread, struct record *record)
{
	u32 one = 1;

	if (is_file(&thread->file, record))
		return;
	thread->file.dev = record->dev;
	thread->file.inode = record->inode;
	if (!bpf_map_lookup_elem(&files, &thread->file) && bpf_map_update_elem(&files, &thread->file, &one, BPF_ANY))
		lose(LOST_FILES, 1);
}

static __always_inline u64 pages_of(struct inode *inode)
{
	return (inode->i_size + (4096ULL << config.page_blocks_log2) - 1) >> (12 + config.page_blocks_log2);
}

/* Describes an access of pages first .. last in `record`; false if the file is not regular or the range is past its end. */
static __always_inline bool describe(struct record *record, struct thread *thread, struct inode *inode, u64 first, u64 last,
				     u8 op)
{
	u64 end_page = pages_of(inode);

	if (!is_regular(inode))
		return false;
	/* A request may reach beyond the end of the file. */
	if (last >= end_page)
		last = end_page - 1;
	if (first > last || !end_page)
		return false;
	name_file(record, inode);
	record->t_ns = bpf_ktime_get_ns();
	record->first = first << config.page_blocks_log2;
	record->count = (last - first + 1) << config.page_blocks_log2;
	record->pid = thread->pid;
	record->aux = 1;
	record->op = op;
	record->miss = UNKNOWN;
	record->kind = ACCESS;
	add_file(thread, record);
	return true;
}

static __always_inline u64 read_calls_made(struct task_struct *task)
{
	if (bpf_core_field_exists(task->ioac.syscr))
		return BPF_CORE_READ(task, ioac.syscr);
	return 0;
}

static __always_inline bool same_call(struct thread *thread, struct record *next)
{
	return is_file(&thread->request_file, next) &&
	       thread->request_call == read_calls_made((void *)bpf_get_current_task());
}

/* A large request causes several events, each with the rest of the request. */
static __always_inline bool continues_request(struct thread *thread, struct record *next)
{
	u64 last = next->first + next->count - 1;

	return last == thread->request_last && next->first > thread->request_first && same_call(thread, next);
}

/* The file open as `fd`, or NULL. */
static struct file *open_file(u32 fd)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **slots = BPF_CORE_READ(table, fd), *file = NULL;

	if (fd >= BPF_CORE_READ(table, max_fds) || bpf_probe_read_kernel(&file, sizeof(file), &slots[fd]))
		return NULL;
	return file;
}

/* The position argument of a call, one of `calls`; -1 if the call uses the file's position, which preadv2 and pwritev2
 * request by this value. */
static __always_inline s64 given_position(const volatile s32 *calls, struct pt_regs *regs)
{
	s64 number = call_number(regs);

	return number == calls[1] || number == calls[3] || number == calls[4] ? (s64)call_argument(regs, 3) : -1;
}

struct part { u64 address, size; };
#define PARTS 16

/* The bytes that a call, one of `config.read_calls`, requests; 0 if it has more than PARTS parts. */
static u64 requested_bytes(struct pt_regs *regs)
{
	s64 number = call_number(regs);
	u64 count = call_argument(regs, 2), size = 0;
	struct part *parts = (void *)call_argument(regs, 1), part;

	if (number == config.read_calls[0] || number == config.read_calls[1])
		return count;
	if (count > PARTS)
		return 0;
	for (u32 index = 0; index < PARTS && index < count; index++) {
		if (bpf_probe_read_user(&part, sizeof(part), &parts[index]))
			return 0;
		size += part.size;
	}
	return size;
}

/* The position at which the current call, one of `config.read_calls` on `inode`, begins to read; -1 for other calls. */
static __always_inline s64 read_position(struct inode *inode, struct pt_regs *regs)
{
	struct file *file;
	s64 position;

	if (!is_call(config.read_calls, call_number(regs)))
		return -1;
	file = open_file(call_argument(regs, 0));
	if (!file || BPF_CORE_READ(file, f_inode) != inode)
		return -1;
	position = given_position(config.read_calls, regs);
	return position < 0 ? BPF_CORE_READ(file, f_pos) : position;
}

/* Narrows blocks first .. last, which are whole pages, to those that the current call requests, if they are known. */
static __always_inline void narrow(struct inode *inode, u64 *first, u64 *last)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
	s64 position;
	u64 size, begin, end;

	if (!config.page_blocks_log2)
		return;
	position = read_position(inode, regs);
	if (position < 0)
		return;
	size = requested_bytes(regs);
	if (!size)
		return;
	begin = (u64)position >> 12;
	end = (position + size - 1) >> 12;
	if (begin > *last || end < *first)
		return;
	if (begin > *first)
		*first = begin;
	if (end < *last)
		*last = end;
}

/* The first block that the current call requests; `first` if it is not known.
 *
 * When a batch of pages ends at a page that is not cached yet, filemap_get_pages returns without its event. The events of a
 * read beyond the readahead then begin with the next batch. */
static __always_inline u64 requested_from(struct inode *inode, u64 first)
{
	s64 position = read_position(inode, (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf()));

	return position >= 0 && position >> 12 < first ? position >> 12 : first;
}

/* Whether a request begins in the block where the last one ended, or in the next one: then no block is between them. */
static __always_inline bool follows(struct thread *thread, struct record *next)
{
	return is_file(&thread->request_file, next) &&
	       (next->first == thread->request_next || next->first + 1 == thread->request_next);
}

/* Removes the page that faulted from the end of the run: it is counted when it is mapped. */
static __always_inline void defer_fault(struct thread *thread)
{
	struct record *run = &thread->slot.run;
	u32 page_blocks = 1 << config.page_blocks_log2;

	if (!thread->slot.live || run->kind != ACCESS || run->op != MAP || !thread->fault_mapping || thread->fault_deferred ||
	    run->first + run->count != thread->fault.first + page_blocks)
		return;
	run->aux -= thread->fault.aux;
	shorten(&thread->slot, run->count - page_blocks);
	thread->fault_deferred = 1;
}

/* Ends the run of a request at block `first`, which has been filled since: the rest of the request is counted after the
 * fill. */
static __always_inline void cut(struct thread *thread, u64 first)
{
	struct record *run = &thread->slot.run;
	u64 end = run->first + run->count;

	if (thread->slot.live && run->kind == ACCESS && run->op == READ && end == thread->request_last + 1 &&
	    first > run->first && first > thread->request_first && first < end) {
		run->count = first - run->first;
		thread->request_next = first;
	}
}

/* A request for blocks first .. last. */
static __always_inline int take_read(struct inode *inode, u64 first, u64 last, u8 flags)
{
	u32 log2 = config.page_blocks_log2;
	struct thread *thread = this_thread();
	struct record next = {};

	if (!thread || !describe(&next, thread, inode, first >> log2, last >> log2, READ))
		return 0;
	next.flags = flags;
	if (last > next.first + next.count - 1)
		last = next.first + next.count - 1;
	if (first > last)
		return 0;
	next.first = first;
	next.count = last - first + 1;
	thread->fault_mapping = NULL;
	if (continues_request(thread, &next)) {
		thread->request_first = next.first;
		if (thread->request_next <= last) {
			next.first = thread->request_next;
			next.count = last - next.first + 1;
			next.aux = 0;
			merge(&thread->slot, &next, 0);
			thread->request_next = last + 1;
		}
	} else {
		if (!flags && !follows(thread, &next) && !same_call(thread, &next)) {
			u64 requested = requested_from(inode, first);

			next.count += next.first - requested;
			next.first = requested;
		}
		thread->request_first = next.first;
		/* Consecutive unaligned requests share a block, which counts once. */
		if (config.max_blocks && next.count > 1 && next.first == thread->request_last &&
		    is_file(&thread->request_file, &next)) {
			next.first++;
			next.count--;
		}
		thread->request_last = last;
		thread->request_file = thread->file;
		if (thread->request_first < last) {
			thread->request_call = read_calls_made((void *)bpf_get_current_task());
			thread->request_in_call = is_call(config.read_calls, current_call());
		}
		merge(&thread->slot, &next, 0);
		thread->request_next = last + 1;
	}
	thread->request_ns = next.t_ns;
	return 0;
}

/* A page entered the page cache: it is read from storage, unless a write created it. */
static __always_inline int take_fill(struct folio *folio)
{
	struct thread *thread = this_thread();
	struct record fill = {};
	struct inode *inode;
	u64 pages;

	if (!thread)
		return 0;
	inode = folio->mapping->host;
	pages = folio_pages(folio);
	if (!describe(&fill, thread, inode, folio->index, folio->index + pages - 1, READ))
		return 0;
	fill.kind = FILL;
	fill.aux = 0;
	if (is_file(&thread->request_file, &fill)) {
		defer_fault(thread);
		cut(thread, fill.first);
	}
	merge(&thread->slot, &fill, 0);
	return 0;
}

#endif

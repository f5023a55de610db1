/* Writes by system call, io_uring and mapping. Also detects fills that are not reads, because a write created the pages. */
#ifndef LLMCACHE_WRITES_H
#define LLMCACHE_WRITES_H

#include "accesses.h"

enum { WRITEV = 2, WRITE_FIXED = 5, WRITE_PLAIN = 23 };	/* operations of io_uring */
enum { RWF_APPEND = 0x10, RWF_NOAPPEND = 0x20, O_APPEND = 02000 };

/* Excludes sendfile, which also reads. */
static __always_inline bool is_writing(s64 number)
{
	return is_call(config.write_calls, number) && number != config.write_calls[5];
}

/* Like `describe`, for an inode that can only be read by probing. */
static __always_inline bool describe_bytes(struct record *record, struct thread *thread, struct inode *inode, s64 start,
					   s64 size, u8 op)
{
	u64 last;

	if (!inode || size <= 0 || start < 0 || (BPF_CORE_READ(inode, i_mode) & S_IFMT) != S_IFREG)
		return false;
	last = (u64)(start + size - 1) >> 12;
	record->t_ns = bpf_ktime_get_ns();
	record->first = (u64)start >> 12;
	record->count = last - record->first + 1;
	record->inode = BPF_CORE_READ(inode, i_ino);
	record->dev = device_number(BPF_CORE_READ(inode, i_sb, s_dev));
	record->pid = thread->pid;
	record->aux = 1;
	record->op = op;
	record->miss = UNKNOWN;
	record->kind = ACCESS;
	add_file(thread, record);
	return true;
}

static __always_inline int take_bytes(struct inode *inode, s64 start, s64 size, u8 op)
{
	struct thread *thread = this_thread();
	struct record next = {};

	if (!thread || !describe_bytes(&next, thread, inode, start, size, op))
		return 0;
	thread->request_last = 0;
	thread->fault_mapping = NULL;
	merge(&thread->slot, &next, start & 4095 ? 1 : 0);
	return 0;
}

/* Whether a call writes at the end of the file, regardless of its position argument. */
static __always_inline bool appends(struct file *file, struct pt_regs *regs)
{
	u32 flags = call_number(regs) == config.write_calls[4] ? call_argument(regs, 5) : 0;

	return flags & RWF_APPEND || (BPF_CORE_READ(file, f_flags) & O_APPEND && !(flags & RWF_NOAPPEND));
}

/* At the end of a call, when the result gives the written bytes, so that short writes are recorded correctly. */
SEC("tp_btf/sys_exit")
int BPF_PROG(wrote, struct pt_regs *regs, long result)
{
	struct inode *inode;
	struct file *file;
	s64 place;

	if (result <= 0 || !is_call(config.write_calls, call_number(regs)) || !this_thread())
		return 0;
	file = open_file(call_argument(regs, 0));
	if (!file)
		return 0;
	inode = BPF_CORE_READ(file, f_inode);
	place = given_position(config.write_calls, regs);
	if (place < 0)
		place = BPF_CORE_READ(file, f_pos) - result;
	else if (appends(file, regs))
		place = BPF_CORE_READ(inode, i_size) - result;
	return take_bytes(inode, place, result, WRITE);
}

static __always_inline int ring_wrote(void *req, s32 result)
{
	struct io_kiocb *request = req;
	struct io_rw *rw = req;
	u8 opcode = BPF_CORE_READ(request, opcode);

	if (result <= 0 || (opcode != WRITEV && opcode != WRITE_FIXED && opcode != WRITE_PLAIN) || !this_thread())
		return 0;
	/* The position is already after the written bytes. */
	return take_bytes(BPF_CORE_READ(request, file, f_inode), BPF_CORE_READ(rw, kiocb.ki_pos) - result, result, WRITE);
}

SEC("tp_btf/io_uring_complete")
int BPF_PROG(uring_wrote, struct io_ring_ctx *ring_ctx, void *req, struct io_uring_cqe *cqe)
{
	return ring_wrote(req, cqe->res);
}

/* Before 6.15, the result was an argument of the tracepoint. */
SEC("tp_btf/io_uring_complete")
int BPF_PROG(uring_wrote_older, void *ring_ctx, void *req, u64 user_data, int result, unsigned int flags)
{
	return ring_wrote(req, result);
}

static __always_inline void drop_fill(struct slot *slot, struct record *dirty)
{
	struct record *run = &slot->run;

	if (slot->live && run->kind == FILL && run->inode == dirty->inode && run->dev == dirty->dev &&
	    run->first <= dirty->first && run->first + run->count == dirty->first + dirty->count)
		shorten(slot, dirty->first - run->first);
}

/* A clean folio became dirty. Outside a system call, the cause is a store through a mapping. */
static __always_inline int take_dirty(struct folio *folio, bool record_stores)
{
	struct thread *thread = this_thread();
	struct record next = {};
	u64 first = folio->index;

	if (!thread || !describe(&next, thread, folio->mapping->host, first, first + folio_pages(folio) - 1, WRITE))
		return 0;
	next.flags = STORED;
	if (current_call() != -1)
		drop_fill(&thread->slot, &next);
	else if (record_stores)
		merge(&thread->slot, &next, 0);
	return 0;
}

SEC("tp_btf/writeback_dirty_folio")
int BPF_PROG(dirtied, struct folio *folio)
{
	return take_dirty(folio, false);
}

SEC("tp_btf/writeback_dirty_folio")
int BPF_PROG(stored, struct folio *folio)
{
	return take_dirty(folio, true);
}

#endif

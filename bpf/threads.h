/* Which threads are recorded: those of the targets, found once by `seed`, and what they start.
 *
 * Threads are kept by their number in the first pid namespace. `pid`, which records carry, is that of the process in the
 * recorder's namespace. */
#ifndef LLMCACHE_THREADS_H
#define LLMCACHE_THREADS_H

#include "runs.h"

struct thread {
	struct slot slot;
	struct file_key request_file;
	u64 request_first, request_last;	/* the last request to read, in blocks */
	u64 request_next;			/* its first block that is not counted yet */
	u64 request_call;			/* the thread's read system calls before it */
	u64 request_ns;				/* when it was last told of */
	u32 request_in_call;			/* it is a read system call's, the end of which can be told */
	u32 uncut;				/* a fill of it, from block `uncut_first` on, found the slot busy (`cut`) */
	u64 uncut_first;
	struct file_key filled_file;		/* of the last fill, */
	u64 filled_end;				/* the block behind it, */
	u64 filled_call;			/* and the thread's read system calls before it */
	struct address_space *fault_mapping;	/* of the last fault, until its page is mapped; */
	struct record fault;			/* that page, */
	u64 fault_end;				/* and the end of its file, in pages */
	struct address_space *around_mapping;	/* of the pages that were mapped around a fault last, */
	u64 around_first, around_last;		/* those pages, */
	u32 around_seq;				/* and mappings_seq() then */
	u32 fault_owed;				/* it was taken out of the run, to be counted when it is mapped */
	u32 fault_told;				/* the last fault was counted: */
	u64 told_first, told_end;		/* what it mapped, in blocks */
	u32 sees_starts;			/* `touched` tells when a fault begins */
	u64 touched;				/* address of the last page fault, until a mapping follows */
	s64 mapped_pages;			/* file pages that the process had mapped then */
	struct file_key file;			/* the last one that was noted in `files` */
	u32 pid;
	u32 gone;				/* it has ended: its last run is to be sent, and this to be removed */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, u32);
	__type(value, struct thread);
} threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, u32);
} targets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct viewer);
} viewers SEC(".maps");

static __always_inline struct thread *this_thread(void)
{
	u32 tid = bpf_get_current_pid_tgid();

	return bpf_map_lookup_elem(&threads, &tid);
}

static __always_inline bool add_thread(u32 tid, u32 pid)
{
	struct thread fresh = {};

	fresh.pid = pid;
	if (!bpf_map_update_elem(&threads, &tid, &fresh, BPF_NOEXIST))
		return true;
	if (!bpf_map_lookup_elem(&threads, &tid))
		lose(LOST_THREADS, 1);
	return false;
}

/* Sends the last run of a thread and removes it. When the lock cannot be had, the flush is at this run, and does it.
 *
 * The slot stays locked: the place may go to another thread at once, while the flush still believes it to be this one's. */
static __always_inline void remove_thread(struct thread *thread, u32 tid)
{
	*(volatile u32 *)&thread->gone = 1;
	if (!lock(&thread->slot))
		return;
	send(&thread->slot);
	bpf_map_delete_elem(&threads, &tid);
}

/* Run by user space: reads every task, adds the targets' threads, and writes a byte for each one added. */
SEC("iter/task")
int seed(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task, *me = (void *)bpf_get_current_task();
	u32 zero = 0, pid, tid;
	struct viewer *viewer = bpf_map_lookup_elem(&viewers, &zero);

	if (!task || !viewer)
		return 0;
	set_viewer(viewer, me);
	pid = visible_pid(task, viewer);
	if (!pid || !bpf_map_lookup_elem(&targets, &pid))
		return 0;
	tid = task->pid;
	if (!add_thread(tid, pid))
		return 0;
	/* One that ended before it was added is not removed by `ended`. */
	if (task->flags & PF_EXITING)
		bpf_map_delete_elem(&threads, &tid);
	else
		bpf_seq_write(ctx->meta->seq, "+", 1);
	return 0;
}

/* Also called for threads of io_uring, which sched_process_fork leaves out. */
SEC("tp_btf/task_newtask")
int BPF_PROG(started, struct task_struct *task, u64 clone_flags)
{
	struct thread *parent = this_thread();
	u32 zero = 0;
	struct viewer *viewer = bpf_map_lookup_elem(&viewers, &zero);

	if (!parent || !viewer)
		return 0;
	if (clone_flags & CLONE_THREAD)
		add_thread(task->pid, parent->pid);
	else if (config.follow)
		add_thread(task->pid, visible_pid(task, viewer));
	return 0;
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(ended, struct task_struct *task)
{
	u32 tid = task->pid;
	struct thread *thread = bpf_map_lookup_elem(&threads, &tid);

	if (thread)
		remove_thread(thread, tid);
	return 0;
}

/* A thread that calls execve takes over the number of its process. */
SEC("tp_btf/sched_process_exec")
int BPF_PROG(replaced, struct task_struct *task, int old_pid)
{
	u32 old = old_pid, tid = task->pid;
	struct thread *thread = bpf_map_lookup_elem(&threads, &old);

	if (!thread || old == tid)
		return 0;
	add_thread(tid, thread->pid);
	remove_thread(thread, old);
	return 0;
}

#endif

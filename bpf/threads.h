/* The recorded threads: those of the target processes, found once by `seed`, and those that they start.
 *
 * Threads are identified by their number in the first pid namespace. `pid`, which records contain, is the number of the
 * process in the recorder's namespace. */
#ifndef LLMCACHE_THREADS_H
#define LLMCACHE_THREADS_H

#include "runs.h"

struct thread {
	struct slot slot;
	struct file_key request_file;
	u64 request_first, request_last;	/* the last request to read, in blocks */
	u64 request_next;			/* its first block that is not counted yet */
	u64 request_call;			/* number of read system calls of the thread before it */
	u64 request_ns;				/* time of its last event */
	u32 request_in_call;			/* it belongs to a read system call, whose end is detectable */
	struct address_space *fault_mapping;	/* the last fault, until its page is mapped: its mapping, */
	struct record fault;			/* its page, */
	u64 fault_end;				/* and the end of its file, in pages */
	struct address_space *around_mapping;	/* the last pages mapped around a fault: their mapping, */
	u64 around_first, around_last;		/* first and last page, */
	u32 around_seq;				/* and mappings_seq() at that time */
	u32 fault_deferred;				/* the fault's page was removed from the run, to be counted when mapped */
	u32 fault_counted;				/* the last fault was counted: */
	u64 counted_first, counted_end;		/* the blocks that it mapped */
	u32 sees_starts;			/* the kernel has an event at the start of a fault (`touched`) */
	u64 touched;				/* address of the last page fault, until pages are mapped */
	s64 mapped_pages;			/* file pages that the process mapped at that time */
	struct file_key file;			/* the last file added to `files` */
	u32 pid;
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

static __always_inline void remove_thread(struct thread *thread, u32 tid)
{
	send(&thread->slot);
	bpf_map_delete_elem(&threads, &tid);
}

/* Run by user space: visits every task, adds the threads of the targets, and writes a byte for each added thread. */
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
	/* `ended` does not remove a thread that ended before it was added. */
	if (task->flags & PF_EXITING)
		bpf_map_delete_elem(&threads, &tid);
	else
		bpf_seq_write(ctx->meta->seq, "+", 1);
	return 0;
}

/* Also called for threads of io_uring, for which sched_process_fork is not. */
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

/* Sending runs that nobody extends: user space asks for it, before it reads the ring. */
#ifndef LLMCACHE_FLUSH_H
#define LLMCACHE_FLUSH_H

#include "evictions.h"

/* What does not grow for so long has ended: a request through io_uring, whose end nothing tells. */
#define STALLED_NS 200000000

extern struct task_struct *bpf_task_from_pid(s32 pid) __ksym __weak;
extern void bpf_task_release(struct task_struct *task) __ksym __weak;

struct flush_result { u32 live, busy; };
struct flushing { struct flush_result result; u64 now_ns; };

/* Whether the thread is still in the call that made its last request: fills of the rest may come. */
static __always_inline bool in_request(struct thread *thread, u32 tid, u64 now_ns)
{
	struct record *run = &thread->slot.run;
	struct task_struct *task;
	bool same_call;

	if (run->kind != ACCESS || run->op != READ || run->first + run->count != thread->request_last + 1 ||
	    thread->request_first >= thread->request_last ||
	    (!thread->request_in_call && now_ns - thread->request_ns > STALLED_NS) || !bpf_task_from_pid)
		return false;
	task = bpf_task_from_pid(tid);
	if (!task)
		return false;
	same_call = read_calls_made(task) == thread->request_call;
	bpf_task_release(task);
	return same_call;
}

/* Sends what was read of a request in progress. The rest is yet to be read, later than now. */
static __always_inline void send_part(struct thread *thread, u64 now_ns)
{
	struct record *run = &thread->slot.run;
	u64 end = run->first + run->count;

	if (thread->request_first > run->first) {
		run->count = thread->request_first - run->first;
		emit(run);
		run->aux = 0;
		run->first = thread->request_first;
		run->count = end - run->first;
	}
	run->t_ns = now_ns;
}

static long flush_thread(void *map, u32 *tid, struct thread *thread, struct flushing *flushing)
{
	flushing->result.live++;
	if (!thread->slot.live)
		return 0;
	if (!lock(&thread->slot)) {
		flushing->result.busy++;
		return 0;
	}
	owe_fault(thread);
	if (in_request(thread, *tid, flushing->now_ns))
		send_part(thread, flushing->now_ns);
	else
		send(&thread->slot);
	unlock(&thread->slot);
	return 0;
}

static long flush_cpu(void *map, u32 *cpu, struct slot *slot, struct flushing *flushing)
{
	if (!slot->live)
		return 0;
	if (!lock(slot)) {
		flushing->result.busy++;
		return 0;
	}
	send(slot);
	unlock(slot);
	return 0;
}

/* Says how many threads are recorded and how many slots were busy, so that it has to be run again. */
SEC("syscall")
int flush(struct flush_result *result)
{
	struct flushing flushing = { .now_ns = bpf_ktime_get_ns() };

	bpf_for_each_map_elem(&threads, flush_thread, &flushing, 0);
	bpf_for_each_map_elem(&evictions, flush_cpu, &flushing, 0);
	result->live = flushing.result.live;
	result->busy = flushing.result.busy;
	return 0;
}

#endif

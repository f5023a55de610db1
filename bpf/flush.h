/* Sending runs that nobody extends: user space asks for it, before it reads the ring. */
#ifndef LLMCACHE_FLUSH_H
#define LLMCACHE_FLUSH_H

#include "evictions.h"

/* What does not grow for so long has ended: a request through io_uring, whose end nothing tells. */
#define STALLED_NS 200000000
/* An event is timed before its slot is locked, so a little may be told later than now that happened before; half of what
 * user space grants it (llmcache/trace/kernel.py). */
#define UNTOLD_NS 1000000

extern struct task_struct *bpf_task_from_pid(s32 pid) __ksym __weak;
extern void bpf_task_release(struct task_struct *task) __ksym __weak;

/* How many threads are recorded and how many slots were busy. `all` is asked for at the end, when nobody is at work. */
struct flush_result { u32 live, busy, all; };

/* Not what grew in the last milliseconds: it is sent by its owner, or by a later flush, which user space waits for. */
static __always_inline bool is_due(struct slot *slot, struct flush_result *result, u64 now_ns)
{
	return slot->live && (result->all || now_ns > slot->grown_ns + 4 * config.max_age_ns);
}

/* Whether the thread is still in the call that made its last request: fills of the rest may come. */
static __always_inline bool in_request(struct thread *thread, u32 tid, u64 now_ns)
{
	struct task_struct *task;
	bool same_call;

	if (thread->request_first >= thread->request_last ||
	    (!thread->request_in_call && now_ns > thread->request_ns + STALLED_NS) || !bpf_task_from_pid)
		return false;
	task = bpf_task_from_pid(tid);
	if (!task)
		return false;
	same_call = read_calls_made(task) == thread->request_call;
	bpf_task_release(task);
	return same_call;
}

static __always_inline void take_all(struct slot *slot, struct record *done)
{
	*done = slot->run;
	slot->live = 0;
}

/* Takes what was read of a request in progress; the rest is yet to be read. All, if the run does not end in one. */
static __always_inline void take_part(struct thread *thread, struct record *done, u64 now_ns)
{
	struct record *run = &thread->slot.run;
	/* Read once: an owner that waits no longer goes on to its next request. */
	u64 first = *(volatile u64 *)&thread->request_first, end = run->first + run->count;
	u64 told_ns = *(volatile u64 *)&thread->request_ns;

	if (run->kind != ACCESS || run->op != READ || end != thread->request_last + 1 || first >= end) {
		take_all(&thread->slot, done);
		return;
	}
	if (first > run->first) {
		*done = *run;
		done->count = first - run->first;
		run->aux = 0;
		run->first = first;
		run->count = end - first;
	}
	run->t_ns = told_ns > now_ns - UNTOLD_NS ? told_ns : now_ns - UNTOLD_NS;
}

/* Sends what was taken, after the slot is unlocked: an owner waits while a record is copied, not for the ring. */
static __always_inline void send_taken(struct record *done)
{
	if (done->count)
		emit(done);
}

/* Does for a thread that ended meanwhile what it could not do itself. */
static __always_inline void remove_ended(struct thread *thread, u32 tid)
{
	if (!*(volatile u32 *)&thread->gone || !lock(&thread->slot))
		return;
	/* By now this may be another thread's place. */
	if (!*(volatile u32 *)&thread->gone) {
		unlock(&thread->slot);
		return;
	}
	send(&thread->slot);
	bpf_map_delete_elem(&threads, &tid);
}

static long flush_thread(void *map, u32 *key, struct thread *thread, struct flush_result *result)
{
	struct record done = {};
	u64 now_ns = bpf_ktime_get_ns(), told_ns = *(volatile u64 *)&thread->request_ns;
	u32 tid = *key;
	bool requesting;

	result->live++;
	if (!is_due(&thread->slot, result, now_ns)) {
		remove_ended(thread, tid);
		return 0;
	}
	requesting = in_request(thread, tid, now_ns);
	if (!lock(&thread->slot)) {
		result->busy++;
		return 0;
	}
	owe_fault(thread);
	/* A request that began since may be in progress. */
	if (thread->slot.live && (requesting || told_ns != *(volatile u64 *)&thread->request_ns))
		take_part(thread, &done, now_ns);
	else if (thread->slot.live)
		take_all(&thread->slot, &done);
	/* Orders this before `gone` is read; a thread sets that before it tries the lock. */
	__sync_lock_test_and_set(&thread->slot.lock, 0);
	send_taken(&done);
	remove_ended(thread, tid);
	return 0;
}

static long flush_cpu(void *map, u32 *cpu, struct slot *slot, struct flush_result *result)
{
	struct record done = {};

	if (!is_due(slot, result, bpf_ktime_get_ns()))
		return 0;
	if (!lock(slot)) {
		result->busy++;
		return 0;
	}
	if (slot->live)
		take_all(slot, &done);
	unlock(slot);
	send_taken(&done);
	return 0;
}

/* While slots were busy, it has to be run again. */
SEC("syscall")
int flush(struct flush_result *result)
{
	struct flush_result counts = { .all = result->all };

	bpf_for_each_map_elem(&threads, flush_thread, &counts, 0);
	bpf_for_each_map_elem(&evictions, flush_cpu, &counts, 0);
	*result = counts;
	return 0;
}

#endif

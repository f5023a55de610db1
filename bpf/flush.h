/* Sends runs that no longer grow. User space runs this before it reads the ring. */
#ifndef LLMCACHE_FLUSH_H
#define LLMCACHE_FLUSH_H

#include "evictions.h"

/* A request that has not grown for this time has ended. Only requests through io_uring need this, because their end has no
 * event. */
#define STALLED_NS 200000000
/* An event gets its time before its slot is locked, so a run that is sent later may be slightly older than the flush. This
 * is half of the delay that user space allows (llmcache/trace/kernel.py). */
#define DELAY_NS 1000000

extern struct task_struct *bpf_task_from_pid(s32 pid) __ksym __weak;
extern void bpf_task_release(struct task_struct *task) __ksym __weak;

/* The number of recorded threads and of busy slots. `all` is set at the end, when no recorded thread runs. */
struct flush_result { u32 live, busy, all; };

/* Runs that grew in the last milliseconds are not due: their owner or a later flush sends them, and user space waits for it. */
static __always_inline bool is_due(struct slot *slot, struct flush_result *result, u64 now_ns)
{
	return slot->live && (result->all || now_ns > slot->grown_ns + 4 * config.max_age_ns);
}

/* Whether the thread is still in the call of its last request, so that further fills may follow. */
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

/* Takes the part of a run that has been read already; if the run does not end in a request, takes all of it. */
static __always_inline void take_part(struct thread *thread, struct record *done, u64 now_ns)
{
	struct record *run = &thread->slot.run;
	/* Read once, because an owner that does not get the lock continues with its next request. */
	u64 first = *(volatile u64 *)&thread->request_first, end = run->first + run->count;
	u64 event_ns = *(volatile u64 *)&thread->request_ns;

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
	run->t_ns = event_ns > now_ns - DELAY_NS ? event_ns : now_ns - DELAY_NS;
}

/* Sends the taken run after the slot is unlocked, so that owners wait only for the copy of a record and not for the ring. */
static __always_inline void send_taken(struct record *done)
{
	if (done->count)
		emit(done);
}

/* Sends the last run of a thread that ended during the flush, and removes it. */
static __always_inline void remove_ended(struct thread *thread, u32 tid)
{
	if (!*(volatile u32 *)&thread->gone || !lock(&thread->slot))
		return;
	/* The entry may belong to another thread by now. */
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
	u64 now_ns = bpf_ktime_get_ns(), event_ns = *(volatile u64 *)&thread->request_ns;
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
	defer_fault(thread);
	/* A request that began after the check may be in progress. */
	if (thread->slot.live && (requesting || event_ns != *(volatile u64 *)&thread->request_ns))
		take_part(thread, &done, now_ns);
	else if (thread->slot.live)
		take_all(&thread->slot, &done);
	/* Orders the unlock before the read of `gone`; a thread sets `gone` before it tries to lock. */
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

/* User space runs this again until no slot is busy. */
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

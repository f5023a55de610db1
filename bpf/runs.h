/* Runs: adjacent blocks of successive accesses of one thread (for evictions, of one CPU), merged.
 *
 * A slot holds the run that is still growing. Only its owner writes it, except that the `flush` program sends old runs from
 * another CPU; `lock` separates the two. The flush skips a busy slot and is called again. An owner that finds its slot
 * locked by the flush retries for some microseconds and then sends its record without the slot. Only the owner writes the
 * state of its requests, with or without the lock; the flush only reads it. The flush skips runs that grew recently: the
 * rarer the two collide, the less a hypervisor that stops the flush while it holds a lock matters.
 *
 * Order: records sorted by time are in the order in which a thread acted. Therefore a fill ends the run of accesses before
 * it, the part of a request after a fill is counted after it, and a page that faults is counted when it is mapped. */
#ifndef LLMCACHE_RUNS_H
#define LLMCACHE_RUNS_H

#include "record.h"

struct slot {
	struct record run;
	u64 grown_ns;	/* when the run last grew: at most `max_age_ns` after its beginning */
	u32 lock;
	u32 live;
};

static __always_inline bool lock(struct slot *slot)
{
	return !__sync_lock_test_and_set(&slot->lock, 1);
}

static __always_inline void unlock(struct slot *slot)
{
	if (config.total_store_order) {
		barrier();
		*(volatile u32 *)&slot->lock = 0;
	} else {
		__sync_lock_test_and_set(&slot->lock, 0);
	}
}

static __always_inline void send(struct slot *slot)
{
	if (slot->live)
		emit(&slot->run);
	slot->live = 0;
}

static __always_inline void begin(struct slot *slot, struct record *run)
{
	send(slot);
	slot->run = *run;
	slot->grown_ns = run->t_ns;
	slot->live = 1;
}

static __always_inline bool same_stream(struct record *a, struct record *b)
{
	return a->inode == b->inode && a->dev == b->dev && a->op == b->op && a->kind == b->kind;
}

/* Whether `next` continues the run of the slot, overlapping it by at most `shared` blocks. */
static __always_inline bool continues(struct slot *slot, struct record *next, u64 shared)
{
	struct record *run = &slot->run;
	u64 end = run->first + run->count;

	return slot->live && same_stream(run, next) && next->first <= end && next->first + shared >= end &&
	       next->first >= run->first && next->first + next->count > end &&
	       next->first + next->count - run->first <= config.max_blocks && next->t_ns - run->t_ns <= config.max_age_ns;
}

static __always_inline void extend(struct slot *slot, struct record *next)
{
	slot->run.count = next->first + next->count - slot->run.first;
	slot->run.aux += next->aux;
	slot->run.flags |= next->flags;
	slot->grown_ns = next->t_ns;
}

static __always_inline void merge(struct slot *slot, struct record *next, u64 shared)
{
	if (continues(slot, next, shared))
		extend(slot, next);
	else
		begin(slot, next);
}

static __always_inline void name_file(struct record *record, struct inode *inode)
{
	record->inode = inode->i_ino;
	record->dev = device_number(inode->i_sb->s_dev);
}

#endif

/* Runs: adjacent blocks of successive accesses of one thread (for evictions, of one CPU), merged.
 *
 * A slot holds the run that is still growing. Only its owner writes it, so it needs no lock: a thread runs on one CPU at a
 * time, and the kernel does not run a program again on a CPU where it is running. The `flush` program copies runs that no
 * longer grow. `live` is the number of the run, 0 while there is none, and changes before and after the run is replaced, so
 * that the flush notices that it has copied parts of two runs.
 *
 * Order: records sorted by time are in the order in which a thread acted. Therefore a fill ends the run of accesses before
 * it, the part of a request after a fill is counted after it, and a page that faults is counted when it is mapped. */
#ifndef LLMCACHE_RUNS_H
#define LLMCACHE_RUNS_H

#include "record.h"

struct slot {
	struct record run;
	u64 grown_ns;	/* when the run last grew: at most `max_age_ns` after its beginning */
	u64 copied_ns;	/* the time of the last run that the flush has copied; only the flush writes this and `fence` */
	u32 live;
	u32 number;	/* of the last run */
	u32 fence;
};

static __always_inline void set_live(struct slot *slot, u32 number)
{
	if (config.total_store_order) {
		barrier();
		*(volatile u32 *)&slot->live = number;
		barrier();
	} else {
		__sync_lock_test_and_set(&slot->live, number);
	}
}

static __always_inline void send(struct slot *slot)
{
	if (!slot->live)
		return;
	emit(&slot->run);
	set_live(slot, 0);
}

static __always_inline void begin(struct slot *slot, struct record *run)
{
	send(slot);
	slot->run = *run;
	slot->grown_ns = run->t_ns;
	slot->number += slot->number == ~0U ? 2 : 1;
	set_live(slot, slot->number);
}

/* Shortens the run, whose end was counted too early. */
static __always_inline void shorten(struct slot *slot, u64 count)
{
	slot->run.count = count;
	if (!count)
		set_live(slot, 0);
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

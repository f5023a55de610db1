/* Page faults, and the pages that the kernel maps at once: cached pages around the faulting one, since 6.18 whole folios.
 *
 * A fault causes up to three events: fault_page, before its page is read from storage; mapped, when the process's count of
 * mapped file pages grows; and map_around, for the pages mapped around it. The first and the last may be missing, and the
 * second one does not name a file. A folio as large as a huge page (2 MiB on x86-64) is mapped at once and causes only the
 * second event: the growth of the count and the address (touched) identify it. Other threads change that count too, and each
 * CPU keeps a part of it, so only growth by at least half a huge page counts. */
#ifndef LLMCACHE_FAULTS_H
#define LLMCACHE_FAULTS_H

#include "accesses.h"

#define MM_FILEPAGES 0
#define MM_ANONPAGES 1
#define PRESENT 1	/* in a fault's error code: the page was mapped, but without this permission */
#define WHOLE_FOLIOS (6 << 16 | 18 << 8)	/* the Linux version from which whole folios are mapped */

/* Removes from `next` the blocks that this fault has counted already, even if their run has been sent; false if none remain. */
static __always_inline bool is_new(struct thread *thread, struct record *next)
{
	u64 end = thread->counted_end, next_end = next->first + next->count;

	/* The page that faulted was removed from its run. */
	if (thread->fault_deferred && thread->fault.first + (1 << config.page_blocks_log2) == end)
		end = thread->fault.first;
	if (next->first < thread->counted_first || next->first >= end)
		return true;
	if (next_end <= end)
		return false;
	next->first = end;
	next->count = next_end - end;
	next->aux = 0;
	return true;
}

static __always_inline void set_counted(struct thread *thread, u64 first, u64 end, bool again)
{
	if (!again || first < thread->counted_first)
		thread->counted_first = first;
	if (!again || end > thread->counted_end)
		thread->counted_end = end;
	thread->fault_deferred = 0;
}

/* Records mapped pages: all of them or, if `again` (a later event of one fault), those not counted yet. */
static __always_inline void take_mapped(struct thread *thread, struct record next, bool again)
{
	struct record *run = &thread->slot.run;
	u64 first = next.first, end = first + next.count;

	next.flags = next.count > 1 << config.page_blocks_log2 ? AROUND : 0;
	thread->request_last = 0;
	if (thread->slot.live && same_stream(run, &next) && run->count == 1 << config.page_blocks_log2 &&
	    run->first >= first && run->first < end) {
		/* The page that faulted is in the run already. */
		run->first = first;
		run->count = next.count;
		run->flags |= next.flags;
	} else if (!again || is_new(thread, &next)) {
		merge(&thread->slot, &next, next.count);
	}
	set_counted(thread, first, end, again);
}

/* Widens first .. last to the folio of page `index`, if it is mapped as a whole, which requires that it ends before page
 * `limit`. */
static __always_inline void widen(struct address_space *mapping, u64 index, u64 limit, u64 *first, u64 *last)
{
	u64 begin = index, end = index;

	if (LINUX_KERNEL_VERSION < WHOLE_FOLIOS)
		return;
	find_folio(mapping, index, &begin, &end);
	if (end >= limit)
		return;
	if (begin < *first)
		*first = begin;
	if (end > *last)
		*last = end;
}

static __always_inline int take_fault(struct address_space *mapping, u64 page)
{
	struct thread *thread = this_thread();
	struct record next = {};

	if (!thread || !describe(&next, thread, mapping->host, page, page, MAP))
		return 0;
	/* A fault that waited for storage is retried and causes the event again. */
	if (thread->fault_mapping == mapping && thread->fault.first == next.first)
		return 0;
	next.aux = !(thread->sees_starts && thread->fault_counted);
	take_mapped(thread, next, !next.aux);
	thread->fault = next;
	thread->fault_end = pages_of(mapping->host);
	thread->fault_mapping = mapping;
	thread->fault_deferred = 0;
	thread->fault_counted = thread->sees_starts;
	thread->request_file = thread->file;
	return 0;
}

/* Changes whenever the process maps or unmaps something; 0 if the kernel has no such counter (before 6.13). */
static __always_inline u32 mappings_seq(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	if (bpf_core_field_exists(((struct mm_struct *)0)->mm_lock_seq.sequence))
		return BPF_CORE_READ(task, mm, mm_lock_seq.sequence) | 1;
	return 0;
}

/* Whether a fault maps the same window around itself as the last fault of the thread. The kernel omits pages that are about
 * to be reclaimed or that DAMON or compaction examines, and repeats the event of the window when one of them is touched
 * later. Pages unmapped in between by MADV_DONTNEED, which has no event, look the same. */
static __always_inline bool mapped_before(struct thread *thread, struct address_space *mapping, u64 first, u64 last)
{
	u32 seq = mappings_seq();
	bool same = seq && seq == thread->around_seq && mapping == thread->around_mapping && first == thread->around_first &&
		    last == thread->around_last;

	thread->around_mapping = mapping;
	thread->around_first = first;
	thread->around_last = last;
	thread->around_seq = seq;
	return same;
}

static __always_inline int take_around(struct address_space *mapping, u64 first, u64 last)
{
	struct thread *thread = this_thread();
	u64 begin = first, end = last, limit;
	struct record next = {};

	if (!thread)
		return 0;
	if (mapped_before(thread, mapping, first, last)) {
		thread->fault_counted = thread->sees_starts;
		thread->fault_mapping = NULL;
		return 0;
	}
	/* The folio at the end of the file is not mapped as a whole. */
	limit = pages_of(mapping->host) - 1;
	widen(mapping, last, limit, &begin, &end);
	if (begin == first)
		widen(mapping, first, limit, &begin, &end);
	if (!describe(&next, thread, mapping->host, begin, end, MAP))
		return 0;
	next.aux = !thread->fault_counted;
	take_mapped(thread, next, thread->fault_counted);
	thread->fault_counted = thread->sees_starts;
	thread->fault_mapping = NULL;
	return 0;
}

/* The number of file pages that a process maps. Before 6.2, the kernel adds the pages of a thread only after 64 faults. */
static __always_inline s64 mapped_file_pages(struct mm_struct *mm)
{
	if (bpf_core_field_exists(((struct mm_struct___atomic *)0)->rss_stat.count[MM_FILEPAGES].counter))
		return BPF_CORE_READ((struct mm_struct___atomic *)mm, rss_stat.count[MM_FILEPAGES].counter);
	return BPF_CORE_READ(mm, rss_stat[MM_FILEPAGES].count);
}

static __always_inline int begin_fault(u64 address, u64 error_code)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct thread *thread = this_thread();

	if (!thread)
		return 0;
	thread->fault_mapping = NULL;
	thread->fault_counted = 0;
	thread->fault_deferred = 0;
	thread->sees_starts = 1;
	thread->touched = error_code & PRESENT ? 0 : address;
	thread->mapped_pages = mapped_file_pages(BPF_CORE_READ(task, mm));
	return 0;
}

SEC("tp_btf/page_fault_user")
int BPF_PROG(touched, unsigned long address, struct pt_regs *regs, unsigned long error_code)
{
	return begin_fault(address, error_code);
}

/* In a system call that accesses mapped memory. */
SEC("tp_btf/page_fault_kernel")
int BPF_PROG(touched_in_call, unsigned long address, struct pt_regs *regs, unsigned long error_code)
{
	return begin_fault(address, error_code);
}

struct search { struct thread *thread; u64 address; };

static long take_huge(struct task_struct *task, struct vm_area_struct *vma, struct search *search)
{
	struct file *file = vma->vm_file;
	u64 page, first = 0, last = 0;
	struct record next = {};

	if (!file)
		return 0;
	page = vma->vm_pgoff + ((search->address - vma->vm_start) >> (12 + config.page_blocks_log2));
	find_folio(file->f_mapping, page, &first, &last);
	if (first < last && describe(&next, search->thread, file->f_mapping->host, first, last, MAP))
		take_mapped(search->thread, next, false);
	return 0;
}

/* The page that faulted is mapped, together with its folio, unless it was copied for a write. */
static __always_inline void take_faulted(struct thread *thread, bool copied)
{
	u64 page = thread->fault.first >> config.page_blocks_log2, first = page, last = page;
	struct record next = thread->fault;

	if (!copied)
		widen(thread->fault_mapping, page, thread->fault_end, &first, &last);
	thread->fault_mapping = NULL;
	thread->fault_counted = 1;
	if (first == last && !thread->fault_deferred)
		return;
	if (!thread->fault_deferred)
		next.aux = 0;
	next.t_ns = bpf_ktime_get_ns();
	next.first = first << config.page_blocks_log2;
	next.count = (last - first + 1) << config.page_blocks_log2;
	take_mapped(thread, next, true);
}

SEC("tp_btf/rss_stat")
int BPF_PROG(mapped, struct mm_struct *mm, int member)
{
	u64 half_huge = 256ULL << config.page_blocks_log2;	/* half the number of entries of a page table, in blocks */
	struct thread *thread;
	struct search search;

	if (member != MM_FILEPAGES && member != MM_ANONPAGES)
		return 0;
	thread = this_thread();
	if (!thread)
		return 0;
	search.thread = thread;
	search.address = thread->touched;
	thread->touched = 0;
	if (thread->fault_mapping) {
		take_faulted(thread, member == MM_ANONPAGES);
	} else if (search.address && member == MM_FILEPAGES &&
		   mapped_file_pages(mm) - thread->mapped_pages >= (s64)half_huge) {
		if (bpf_find_vma(bpf_get_current_task_btf(), search.address, take_huge, &search, 0))
			lose(LOST_HUGE, 1);
		thread->fault_counted = 1;
	}
	return 0;
}

#endif

/* llmcache trace: records the file blocks that processes touch.
 *
 * The programs of three tiers; user space loads those of one (llmcache/trace/kernel.py):
 *   filemap    tracepoints of the page cache, Linux 6.12 and later
 *   fexit      the functions behind them, for older kernels
 *   syscalls   the requests of system calls; no page faults */
#include "accesses.h"
#include "faults.h"
#include "writes.h"
#include "block.h"
#include "evictions.h"
#include "flush.h"

/* Helpers that read kernel memory require a GPL-compatible licence. */
char LICENSE[] SEC("license") = "Dual MIT/GPL";

SEC("tp_btf/mm_filemap_get_pages")
int BPF_PROG(read_pages, struct address_space *mapping, unsigned long first, unsigned long last)
{
	u64 first_block = first << config.page_blocks_log2, last_block = ((last + 1) << config.page_blocks_log2) - 1;

	narrow(mapping->host, &first_block, &last_block);
	return take_read(mapping->host, first_block, last_block, 0);
}

SEC("tp_btf/mm_filemap_fault")
int BPF_PROG(fault_page, struct address_space *mapping, unsigned long page)
{
	return take_fault(mapping, page);
}

SEC("tp_btf/mm_filemap_map_pages")
int BPF_PROG(map_around, struct address_space *mapping, unsigned long first, unsigned long last)
{
	return take_around(mapping, first, last);
}

SEC("tp_btf/mm_filemap_add_to_page_cache")
int BPF_PROG(filled, struct folio *folio)
{
	/* A write that creates pages reads nothing from storage. */
	if (!this_thread() || is_writing(current_call()))
		return 0;
	return take_fill(folio);
}

/* Runs in the requesting thread, also for io_uring. The size is the requested one, whether or not the device delivers it. */
SEC("tp_btf/iomap_dio_rw_begin")
int BPF_PROG(read_direct, struct kiocb *kiocb, struct iov_iter *iter)
{
	u64 start = kiocb->ki_pos, size = iter->count;

	if (iter->data_source || !size)
		return 0;
	return take_read(kiocb->ki_filp->f_inode, start >> 12, (start + size - 1) >> 12, DIRECT);
}

SEC("fexit/filemap_read")
int BPF_PROG(read_returned, struct kiocb *kiocb, void *iter, s64 already, s64 result)
{
	u64 end = kiocb->ki_pos;

	if (result <= already)
		return 0;
	return take_read(kiocb->ki_filp->f_inode, (end - (result - already)) >> 12, (end - 1) >> 12, 0);
}

SEC("fexit/filemap_fault")
int BPF_PROG(fault_returned, struct vm_fault *fault)
{
	return take_fault(faulting_file(fault), fault->pgoff);
}

/* Without VM_FAULT_NOPAGE the page that faulted is not cached; `fault_returned` records it later. */
SEC("fexit/filemap_map_pages")
int BPF_PROG(map_returned, struct vm_fault *fault, unsigned long first, unsigned long last, u32 result)
{
	if (!(result & VM_FAULT_NOPAGE))
		return 0;
	return take_around(faulting_file(fault), first, last);
}

SEC("tp_btf/sys_exit")
int BPF_PROG(read_call_returned, struct pt_regs *regs, long result)
{
	struct file *file;
	s64 place;

	if (result <= 0 || !is_call(config.read_calls, call_number(regs)) || !this_thread())
		return 0;
	file = open_file(call_argument(regs, 0));
	if (!file)
		return 0;
	place = given_position(config.read_calls, regs);
	return take_bytes(BPF_CORE_READ(file, f_inode), place < 0 ? BPF_CORE_READ(file, f_pos) - result : place, result, READ);
}

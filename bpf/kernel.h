/* The fields of kernel structures that the programs read, relocated at load (CO-RE) to their offsets in the running kernel.
 *
 * There is no vmlinux.h, so this is the complete list of dependencies. A name with three underscores is a flavour: the same
 * structure in another version of the kernel. */
#ifndef LLMCACHE_KERNEL_H
#define LLMCACHE_KERNEL_H

#include <linux/types.h>
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct super_block { u32 s_dev; };
struct inode { u16 i_mode; struct super_block *i_sb; unsigned long i_ino; s64 i_size; };
struct xarray { void *xa_head; };
struct xa_node { u8 shift; void *slots[64]; };
struct idr { struct xarray idr_rt; };
struct address_space { struct inode *host; struct xarray i_pages; };
struct folio { unsigned long flags; struct address_space *mapping; unsigned long index; };
struct flags_word { unsigned long f; };
struct folio___memdesc { struct flags_word flags; };		/* >= 6.18 */
struct folio___sized { unsigned int _nr_pages; };		/* >= 6.15 */
struct folio___named { unsigned int _folio_nr_pages; };
struct folio_batch { unsigned char nr; };
struct page { unsigned long compound_head; };
struct file { struct inode *f_inode; struct address_space *f_mapping; s64 f_pos; unsigned int f_flags; };
struct kiocb { struct file *ki_filp; s64 ki_pos; };
struct iov_iter { bool data_source; unsigned long count; };
struct vm_area_struct { unsigned long vm_start, vm_pgoff; struct file *vm_file; };
struct percpu_counter { s64 count; };
struct seqcount { unsigned int sequence; };
struct mm_struct { struct percpu_counter rss_stat[4]; void *pgd; struct seqcount mm_lock_seq; };
struct counter_word { s64 counter; };
struct counters { struct counter_word count[4]; };
struct mm_struct___atomic { struct counters rss_stat; };		/* < 6.2 */
struct vm_fault { struct vm_area_struct *vma; unsigned long pgoff; };

struct hlist_node { struct hlist_node *next; };
struct hlist_head { struct hlist_node *first; };
struct pid_namespace { struct idr idr; };
struct upid { int nr; struct pid_namespace *ns; };
struct pid { unsigned int level; struct hlist_head tasks[4]; struct upid numbers[1]; };
struct fdtable { unsigned int max_fds; struct file **fd; };
struct files_struct { struct fdtable *fdt; };
struct task_io_accounting { u64 syscr, read_bytes; };
struct task_struct {
	unsigned int flags;
	int pid, tgid;
	struct task_struct *real_parent, *group_leader;
	struct pid *thread_pid;
	struct hlist_node pid_links[4];
	struct files_struct *files;
	struct mm_struct *mm;
	u64 start_time;
	unsigned long maj_flt;
	struct task_io_accounting ioac;
};
struct pt_regs { char opaque; };
struct pt_regs___x86 { unsigned long r9, r10, di, si, dx, orig_ax; };
struct pt_regs___arm64 { u64 regs[31]; u64 orig_x0; s32 syscallno; };

struct block_device { u32 bd_dev; };
struct bvec_iter { u64 bi_sector; unsigned int bi_size, bi_idx, bi_bvec_done; } __attribute__((packed));
struct bio_vec { struct page *bv_page; unsigned int bv_len, bv_offset; };
struct bio { struct block_device *bi_bdev; u32 bi_opf; struct bvec_iter bi_iter; struct bio_vec *bi_io_vec;
	     struct bio *bi_next; };
struct request { struct bio *bio; };
struct request_queue { char opaque; };

struct io_uring_cqe { s32 res; };
struct io_kiocb { struct file *file; u8 opcode; };
struct io_rw { struct kiocb kiocb; };
struct io_ring_ctx { char opaque; };
struct linux_binprm { char opaque; };

struct seq_file { char opaque; };
struct bpf_iter_meta { struct seq_file *seq; };
struct bpf_iter__task { struct bpf_iter_meta *meta; struct task_struct *task; };

#pragma clang attribute pop

extern int LINUX_KERNEL_VERSION __kconfig;
extern struct task_struct *bpf_task_from_pid(s32 pid) __ksym __weak;
extern void bpf_task_release(struct task_struct *task) __ksym __weak;

enum pageflags { PG_head = 6 };

#define VM_FAULT_NOPAGE 0x100
#define S_IFMT 0xf000
#define S_IFREG 0x8000
#define PF_EXITING 0x4
#define CLONE_THREAD 0x10000

static __always_inline bool is_regular(struct inode *inode)
{
	return (inode->i_mode & S_IFMT) == S_IFREG;
}

/* st_dev as in user space, from the kernel's 12 + 20 bits. */
static __always_inline u64 device_number(u32 dev)
{
	u64 major = dev >> 20, minor = dev & 0xfffff;

	return (minor & 0xff) | major << 8 | (minor & ~0xffULL) << 12;
}

struct file_key {
	u64 dev;
	u64 inode;
};

static __always_inline struct file_key file_key(struct inode *inode)
{
	struct file_key key = { .dev = device_number(BPF_CORE_READ(inode, i_sb, s_dev)), .inode = BPF_CORE_READ(inode, i_ino) };

	return key;
}

/* The pid namespace of user space: its identity and its level. */
struct viewer {
	u64 ns;
	u32 level, spare;
};

static __always_inline void *number_of(struct pid *pid, u32 level)
{
	return (void *)pid + bpf_core_field_offset(struct pid, numbers) + level * bpf_core_type_size(struct upid);
}

static __always_inline u64 namespace_of(struct pid *pid, u32 level)
{
	u64 ns = 0;

	bpf_probe_read_kernel(&ns, sizeof(ns), number_of(pid, level) + bpf_core_field_offset(struct upid, ns));
	return ns;
}

/* Sets the viewer to the namespace of `me`. */
static __always_inline void set_viewer(struct viewer *viewer, struct task_struct *me)
{
	struct pid *pid = BPF_CORE_READ(me, thread_pid);

	viewer->level = BPF_CORE_READ(pid, level);
	viewer->ns = namespace_of(pid, viewer->level);
}

/* The pid of a process in the viewer's namespace; 0 if it has none there. */
static u32 visible_pid(struct task_struct *task, struct viewer *viewer)
{
	struct pid *pid = BPF_CORE_READ(task, group_leader, thread_pid);
	u32 nr = 0;

	if (!pid || BPF_CORE_READ(pid, level) < viewer->level || namespace_of(pid, viewer->level) != viewer->ns)
		return 0;
	bpf_probe_read_kernel(&nr, sizeof(nr), number_of(pid, viewer->level) + bpf_core_field_offset(struct upid, nr));
	return nr;
}

static __always_inline u64 folio_pages(struct folio *folio)
{
	unsigned long flags;

	if (bpf_core_field_exists(((struct folio___memdesc *)0)->flags.f))
		flags = BPF_CORE_READ((struct folio___memdesc *)folio, flags.f);
	else
		flags = BPF_CORE_READ(folio, flags);
	if (!(flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1))
		return 1;
	if (bpf_core_field_exists(((struct folio___sized *)0)->_nr_pages))
		return BPF_CORE_READ((struct folio___sized *)folio, _nr_pages);
	if (bpf_core_field_exists(((struct folio___named *)0)->_folio_nr_pages))
		return BPF_CORE_READ((struct folio___named *)folio, _folio_nr_pages);
	return 1;
}

/* The pointer at `index` in the kernel's array with this `head`; 0 if there is none.
 *
 * Entries whose two low bits are 10 are nodes if they are large; small ones point to the slot of the first index of an entry
 * with several indexes. Other entries with low bits set are values, for example shadows of evicted pages. */
static __noinline u64 array_entry(u64 head, u64 index)
{
	u64 entry = head, slots = bpf_core_field_offset(struct xa_node, slots);

	if ((head & 3) != 2 && index)
		return 0;
	for (int level = 0; level < 8 && (entry & 3) == 2 && entry > 4096; level++) {
		u64 node = entry - 2, slot = index >> BPF_CORE_READ((struct xa_node *)node, shift);

		if (!level && slot > 63)
			return 0;
		slot &= 63;
		entry = 0;
		bpf_probe_read_kernel(&entry, sizeof(entry), (void *)(node + slots + slot * 8));
		if ((entry & 3) == 2 && entry < 256)
			bpf_probe_read_kernel(&entry, sizeof(entry), (void *)(node + slots + (entry >> 2) * 8));
	}
	return entry & 3 ? 0 : entry;
}

/* The first and last page of the page-cache folio with page `index`; that page alone if it is not cached. */
static __noinline int find_folio(struct address_space *mapping, u64 index, u64 *first, u64 *last)
{
	struct folio *folio;

	if (!first || !last)
		return 0;
	*first = *last = index;
	folio = (void *)array_entry((u64)BPF_CORE_READ(mapping, i_pages.xa_head), index);
	if (!folio)
		return 0;
	*first = BPF_CORE_READ(folio, index);
	*last = *first + folio_pages(folio) - 1;
	return 0;
}

/* The thread with a number in the pid namespace of this process; NULL if there is none.
 *
 * The kernel may free the thread meanwhile, so its fields are to be read with BPF_CORE_READ only. A function that returns a
 * reference exists only since Linux 6.2, and one that takes a number of this namespace since 6.14. */
static __always_inline struct task_struct *find_thread(s32 number)
{
	struct pid *mine = BPF_CORE_READ(bpf_get_current_task_btf(), thread_pid), *pid;
	u64 ns = namespace_of(mine, BPF_CORE_READ(mine, level)), head, link;

	head = (u64)BPF_CORE_READ((struct pid_namespace *)ns, idr.idr_rt.xa_head);
	pid = (void *)array_entry(head, (u32)number);
	link = pid ? (u64)BPF_CORE_READ(pid, tasks[0].first) : 0;
	return link ? (void *)(link - bpf_core_field_offset(struct task_struct, pid_links)) : NULL;
}

/* The file of a page fault on a mapping of a file. */
static __always_inline struct address_space *faulting_file(struct vm_fault *fault)
{
	return fault->vma->vm_file->f_mapping;
}

/* The number of the system call that a thread is in or has just finished; -1 in an exception, for example a page fault. */
static __always_inline s64 call_number(struct pt_regs *regs)
{
	if (bpf_core_field_exists(((struct pt_regs___x86 *)0)->orig_ax))
		return BPF_CORE_READ((struct pt_regs___x86 *)regs, orig_ax);
	return BPF_CORE_READ((struct pt_regs___arm64 *)regs, syscallno);
}

/* Argument 0, 1, 2, 3 or 5 of a system call. */
static __always_inline u64 call_argument(struct pt_regs *regs, int number)
{
	if (bpf_core_field_exists(((struct pt_regs___x86 *)0)->orig_ax)) {
		struct pt_regs___x86 *x86 = (void *)regs;

		switch (number) {
		case 0: return BPF_CORE_READ(x86, di);
		case 1: return BPF_CORE_READ(x86, si);
		case 2: return BPF_CORE_READ(x86, dx);
		case 3: return BPF_CORE_READ(x86, r10);
		default: return BPF_CORE_READ(x86, r9);
		}
	}
	struct pt_regs___arm64 *arm = (void *)regs;

	/* The result overwrites the first argument's register. */
	switch (number) {
	case 0: return BPF_CORE_READ(arm, orig_x0);
	case 1: return BPF_CORE_READ(arm, regs[1]);
	case 2: return BPF_CORE_READ(arm, regs[2]);
	case 3: return BPF_CORE_READ(arm, regs[3]);
	default: return BPF_CORE_READ(arm, regs[5]);
	}
}

#endif

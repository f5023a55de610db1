/* The time of the threads of observed processes, and their reads of watched memory (llmcache/tokens/observer.py).
 *
 * User space names the processes (`watch`) and opens hardware breakpoints on bytes of their tensors, whose program is `hit`.
 * The time of a process is divided at each switch of one of its threads: into time in which at least one thread waits for
 * storage, time in which none does and at least one runs, and the rest. The part of the rest in which a thread waits for a
 * processor is counted as well, because the process is not idle then. A hit reports the sums until then. */
#include "kernel.h"

char LICENSE[] SEC("license") = "Dual MIT/GPL";

#define HIT 1		/* a thread has read watched memory */
#define WAIT 2		/* a thread has waited for a page of a file */
#define LOOK 3		/* user space has requested the sums */
#define RUNNING 1	/* states of a thread: it has a processor, */
#define BLOCKED 2	/* it waits in the kernel for storage, */
#define AWAY 3		/* it waits for something else, */
#define QUEUED 4	/* or for a processor */
#define CHUNK_SHIFT 6	/* reports of waits are merged within 64 pages, */
#define QUIET_NS 4000000	/* for this time: they are bounded by the rate of new data, not of faults */
#define TASK_UNINTERRUPTIBLE 0x2
#define TASK_DEAD 0x80
#define TASK_NOLOAD 0x400

/* The threads of a process by state, the time since the last change of them, and the sums until then. */
struct account {
	s64 running, blocked, queued;
	u64 since_ns, compute_ns, storage_ns, other_ns, wait_ns, major_faults, read_bytes, queued_ns;
	u32 pid, spare;		/* its number as user space sees it */
};
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, u32);
	__type(value, struct account);
} accounts SEC(".maps");

/* A thread: its state, since when it is blocked, its counters when they were last added, the page that it faulted on, and
 * its waits since its last report. */
struct thread {
	u64 since_ns, major_faults, read_bytes;
	struct file_key file;
	u64 page, chunk, sent_ns, pending_ns;
	u64 hit_ns, hit_state;	/* of the last hit: its time, and a hash of the registers */
	u32 state, has_page;
};
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, struct thread);
} threads SEC(".maps");

/* `place`: the role of the tensor (HIT), or the page of `file` (WAIT). The `wait_ns` of a WAIT is the time that the thread
 * has waited since its last report. */
struct event {
	u64 t_ns;
	u32 kind, pid;
	u64 place;
	struct file_key file;
	u64 compute_ns, storage_ns, other_ns, wait_ns, major_faults, read_bytes, queued_ns;
};
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} lost SEC(".maps");

static __always_inline void send(struct event *event)
{
	u32 zero = 0;
	u64 *count;

	if (!bpf_ringbuf_output(&ring, event, sizeof(*event), BPF_RB_NO_WAKEUP))
		return;
	count = bpf_map_lookup_elem(&lost, &zero);
	if (count)
		__sync_fetch_and_add(count, 1);
}

/* Adds the time since the last change. The exchange gives each stretch of time to exactly one processor. */
static __always_inline void advance(struct account *account, u64 now)
{
	u64 since = __sync_lock_test_and_set(&account->since_ns, now);

	if (!since || since >= now)
		return;
	if (account->blocked > 0)
		__sync_fetch_and_add(&account->storage_ns, now - since);
	else if (account->running > 0)
		__sync_fetch_and_add(&account->compute_ns, now - since);
	else
		__sync_fetch_and_add(&account->other_ns, now - since);
	if (account->blocked <= 0 && account->running <= 0 && account->queued > 0)
		__sync_fetch_and_add(&account->queued_ns, now - since);
}

static __always_inline struct thread *thread_of(struct task_struct *task)
{
	struct thread fresh = { .major_faults = task->maj_flt, .read_bytes = task->ioac.read_bytes };
	u32 tid = task->pid;
	struct thread *thread = bpf_map_lookup_elem(&threads, &tid);

	if (thread)
		return thread;
	bpf_map_update_elem(&threads, &tid, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&threads, &tid);
}

static __always_inline void become(struct account *account, struct thread *thread, u32 state)
{
	u32 old = thread->state;

	if (old == state)
		return;
	thread->state = state;
	if (old == RUNNING)
		__sync_fetch_and_add(&account->running, -1);
	else if (old == BLOCKED)
		__sync_fetch_and_add(&account->blocked, -1);
	else if (old == QUEUED)
		__sync_fetch_and_add(&account->queued, -1);
	if (state == RUNNING)
		__sync_fetch_and_add(&account->running, 1);
	else if (state == BLOCKED)
		__sync_fetch_and_add(&account->blocked, 1);
	else if (state == QUEUED)
		__sync_fetch_and_add(&account->queued, 1);
}

/* Adds the growth of the kernel's counters of a thread. */
static __always_inline void take_counts(struct account *account, struct thread *thread, struct task_struct *task)
{
	u64 faults = task->maj_flt, bytes = task->ioac.read_bytes;

	if (faults > thread->major_faults)
		__sync_fetch_and_add(&account->major_faults, faults - thread->major_faults);
	if (bytes > thread->read_bytes)
		__sync_fetch_and_add(&account->read_bytes, bytes - thread->read_bytes);
	thread->major_faults = faults;
	thread->read_bytes = bytes;
}

static __always_inline void report(struct account *account, u64 now, u32 kind, u64 place)
{
	struct event event = {
		.t_ns = now, .kind = kind, .pid = account->pid, .place = place,
		.compute_ns = account->compute_ns, .storage_ns = account->storage_ns, .other_ns = account->other_ns,
		.wait_ns = account->wait_ns, .major_faults = account->major_faults, .read_bytes = account->read_bytes,
		.queued_ns = account->queued_ns,
	};

	send(&event);
}

static __always_inline void leaves(struct task_struct *task, unsigned int state, u64 now)
{
	u32 tgid = task->tgid, tid = task->pid;
	struct account *account = bpf_map_lookup_elem(&accounts, &tgid);
	struct thread *thread = account ? thread_of(task) : NULL;

	if (account && thread) {
		advance(account, now);
		take_counts(account, thread, task);
		thread->since_ns = now;
		if (!state)
			become(account, thread, QUEUED);
		else
			become(account, thread, state & TASK_UNINTERRUPTIBLE && !(state & TASK_NOLOAD) ? BLOCKED : AWAY);
	}
	if (state & TASK_DEAD)	/* the last switch of a thread comes after `ended` */
		bpf_map_delete_elem(&threads, &tid);
}

static __always_inline void waited(struct account *account, struct thread *thread, u64 now)
{
	struct event event = { .t_ns = now, .kind = WAIT, .pid = account->pid };

	__sync_fetch_and_add(&account->wait_ns, now - thread->since_ns);
	if (!thread->has_page)
		return;
	thread->pending_ns += now - thread->since_ns;
	if (thread->page >> CHUNK_SHIFT == thread->chunk && now - thread->sent_ns < QUIET_NS)
		return;
	event.place = thread->page;
	event.file = thread->file;
	event.wait_ns = thread->pending_ns;
	thread->chunk = thread->page >> CHUNK_SHIFT;
	thread->pending_ns = 0;
	thread->sent_ns = now;
	send(&event);
}

static __always_inline void enters(struct task_struct *task, u64 now)
{
	u32 tgid = task->tgid;
	struct account *account = bpf_map_lookup_elem(&accounts, &tgid);
	struct thread *thread;

	if (!account)
		return;
	thread = thread_of(task);
	if (!thread)
		return;
	advance(account, now);
	if (thread->state == BLOCKED && now > thread->since_ns)
		waited(account, thread, now);
	become(account, thread, RUNNING);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(switched, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
{
	u64 now = bpf_ktime_get_ns();

	leaves(prev, preempt ? 0 : prev_state, now);
	enters(next, now);
	return 0;
}

/* A page that a thread waits for, until it faults on another one. */
static __always_inline int faults_on(struct address_space *mapping, u64 page)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u32 tgid = task->tgid;
	struct thread *thread;

	if (!bpf_map_lookup_elem(&accounts, &tgid))
		return 0;
	thread = thread_of(task);
	if (!thread)
		return 0;
	thread->file = file_key(mapping->host);
	thread->page = page;
	thread->has_page = 1;
	return 0;
}

SEC("tp_btf/mm_filemap_fault")
int BPF_PROG(fault_page, struct address_space *mapping, unsigned long page)
{
	return faults_on(mapping, page);
}

SEC("tp_btf/mm_filemap_get_pages")
int BPF_PROG(read_pages, struct address_space *mapping, unsigned long first, unsigned long last)
{
	return faults_on(mapping, first);
}

SEC("fentry/filemap_fault")
int BPF_PROG(fault_begun, struct vm_fault *fault)
{
	return faults_on(faulting_file(fault), fault->pgoff);
}

SEC("fentry/filemap_get_read_batch")
int BPF_PROG(batch_sought, struct address_space *mapping, unsigned long first)
{
	return faults_on(mapping, first);
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(ended, struct task_struct *task)
{
	u32 tgid = task->tgid, tid = task->pid;
	struct account *account = bpf_map_lookup_elem(&accounts, &tgid);
	struct thread *thread;
	u64 now = bpf_ktime_get_ns();

	if (!account)
		return 0;
	thread = bpf_map_lookup_elem(&threads, &tid);
	if (thread) {
		advance(account, now);
		take_counts(account, thread, task);
		become(account, thread, AWAY);
		bpf_map_delete_elem(&threads, &tid);
	}
	if (tid == tgid) {
		report(account, now, LOOK, 0);
		bpf_map_delete_elem(&accounts, &tgid);
	}
	return 0;
}

#define REGISTER_WORDS 21	/* struct pt_regs of x86-64; the first ones of arm64 */
#define SAME_HIT_NS 200000

/* A hash of the registers of the interrupted user code; 0 if they cannot be read. */
static __always_inline u64 user_state(struct task_struct *task)
{
	u64 words[REGISTER_WORDS], hash = 14695981039346656037ULL;

	if (bpf_probe_read_kernel(words, sizeof(words), (void *)bpf_task_pt_regs(task)))
		return 0;
	for (int at = 0; at < REGISTER_WORDS; at++)
		hash = (hash ^ words[at]) * 1099511628211ULL;
	return hash;
}

/* Whether this is a second report of the last hit. A thread that starts while breakpoints are set may have two: its own and an
 * inherited one. Both fire in one exception; between two reads, the registers differ or the time of a pass goes by. */
static __always_inline int is_repeated(struct thread *thread, struct task_struct *task, u32 role, u64 now)
{
	u64 state = user_state(task) + role;
	int same = state == thread->hit_state && now - thread->hit_ns < SAME_HIT_NS;

	thread->hit_state = state;
	thread->hit_ns = now;
	return same;
}

/* At a hardware breakpoint, right after the instruction that has read the watched bytes. */
static __always_inline int read_by_thread(u32 role)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u32 tgid = bpf_get_current_pid_tgid() >> 32, tid = bpf_get_current_pid_tgid();
	struct account *account = bpf_map_lookup_elem(&accounts, &tgid);
	struct thread *thread = bpf_map_lookup_elem(&threads, &tid);
	u64 now = bpf_ktime_get_ns();

	if (!account || (thread && is_repeated(thread, task, role, now)))
		return 0;
	advance(account, now);
	if (thread) {
		take_counts(account, thread, task);
		become(account, thread, RUNNING);
	}
	report(account, now, HIT, role);
	return 0;
}

/* One program for each watched tensor: the context of a breakpoint depends on the processor and is not read. */
SEC("perf_event")
int hit_first(void *context)
{
	return read_by_thread(0);
}

SEC("perf_event")
int hit_later(void *context)
{
	return read_by_thread(1);
}

struct subject { u32 pid, found; };

/* Run by user space: counts the time of a process from now on; reports the sums of one that is watched already. */
SEC("syscall")
int watch(struct subject *subject)
{
	struct account fresh = { .pid = subject->pid }, *account;
	struct task_struct *task = find_thread(subject->pid);
	u64 now = bpf_ktime_get_ns();
	u32 tgid;

	if (!task)
		return 0;
	tgid = BPF_CORE_READ(task, tgid);
	subject->found = 1;
	fresh.since_ns = now;
	account = bpf_map_lookup_elem(&accounts, &tgid);
	if (!account) {
		bpf_map_update_elem(&accounts, &tgid, &fresh, BPF_NOEXIST);
		return 0;
	}
	advance(account, now);
	report(account, now, LOOK, 0);
	return 0;
}

/* paths FILE WAY: after a line on stdin, send 23 requests of one block each to FILE, by one way to read or write.
 *
 * Request i is for block 3 + 40 * i, so that no two are adjacent or share a fault-around window; other ways are described
 * where they are defined. Prints "ok", or the missing feature with exit code 77. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REQUESTS = 23, BLOCK = 4096, SIZE = 1024 * BLOCK };

static char *buffer;
static const char *path;
static int fd;

static off_t place(int i)
{
	return (off_t)(3 + 40 * i) * BLOCK;
}

static void need(int fine, const char *what)
{
	if (fine)
		return;
	perror(what);
	exit(errno == ENOSYS || errno == EPERM || errno == EINVAL ? 77 : 1);
}

static void one_read(int i)
{
	need(lseek(fd, place(i), SEEK_SET) >= 0, "lseek");
	need(read(fd, buffer, BLOCK) == BLOCK, "read");
}

static void one_pread(int i) { need(pread(fd, buffer, BLOCK, place(i)) == BLOCK, "pread"); }

static struct iovec *halves(void)
{
	static struct iovec parts[2];

	parts[0] = (struct iovec){ buffer, BLOCK / 2 };
	parts[1] = (struct iovec){ buffer + 2 * BLOCK, BLOCK / 2 };
	return parts;
}

static void one_readv(int i)
{
	need(lseek(fd, place(i), SEEK_SET) >= 0, "lseek");
	need(readv(fd, halves(), 2) == BLOCK, "readv");
}

static void one_preadv(int i) { need(preadv(fd, halves(), 2, place(i)) == BLOCK, "preadv"); }
static void one_preadv2(int i) { need(preadv2(fd, halves(), 2, place(i), 0) == BLOCK, "preadv2"); }

static void one_sendfile(int i)
{
	static int sink = -1;
	off_t offset = place(i);

	if (sink < 0)
		sink = open("/dev/null", O_WRONLY);
	need(sendfile(sink, fd, &offset, BLOCK) == BLOCK, "sendfile");
}

static void one_splice(int i)
{
	static int ends[2] = { -1 };
	loff_t offset = place(i);

	if (ends[0] < 0)
		need(pipe(ends) == 0, "pipe");
	need(splice(fd, &offset, ends[1], NULL, BLOCK, 0) == BLOCK, "splice");
	need(read(ends[0], buffer, BLOCK) == BLOCK, "read");
}

static void one_write(int i)
{
	need(lseek(fd, place(i), SEEK_SET) >= 0, "lseek");
	need(write(fd, buffer, BLOCK) == BLOCK, "write");
}

static void one_pwrite(int i) { need(pwrite(fd, buffer, BLOCK, place(i)) == BLOCK, "pwrite"); }

static void one_writev(int i)
{
	need(lseek(fd, place(i), SEEK_SET) >= 0, "lseek");
	need(writev(fd, halves(), 2) == BLOCK, "writev");
}

static void one_pwritev(int i) { need(pwritev(fd, halves(), 2, place(i)) == BLOCK, "pwritev"); }
static void one_pwritev2(int i) { need(pwritev2(fd, halves(), 2, place(i), 0) == BLOCK, "pwritev2"); }

static void one_pwritev2_at_position(int i)
{
	need(lseek(fd, place(i), SEEK_SET) >= 0, "lseek");
	need(pwritev2(fd, halves(), 2, -1, 0) == BLOCK, "pwritev2");
}

static volatile char *mapped(int protection)
{
	static char *memory;

	if (!memory)
		memory = mmap(NULL, SIZE, protection, MAP_SHARED, fd, 0);
	need(memory != MAP_FAILED, "mmap");
	return memory;
}

static void one_load(int i) { buffer[0] = mapped(PROT_READ)[place(i)]; }
static void one_store(int i) { mapped(PROT_READ | PROT_WRITE)[place(i)] = (char)i; }

static struct io_uring_params ring_parameters;
static struct io_uring_sqe *entries;
static char *submissions, *completions;

static int open_ring(unsigned flags)
{
	struct io_uring_params *p = &ring_parameters;
	int ring, kind = PROT_READ | PROT_WRITE;

	p->flags = flags;
	p->sq_thread_idle = 1000;
	ring = syscall(SYS_io_uring_setup, 64, p);
	need(ring >= 0, "io_uring_setup");
	submissions = mmap(0, p->sq_off.array + p->sq_entries * 4, kind, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	entries = mmap(0, p->sq_entries * sizeof(*entries), kind, MAP_SHARED, ring, IORING_OFF_SQES);
	completions = mmap(0, p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe), kind, MAP_SHARED, ring,
			   IORING_OFF_CQ_RING);
	return ring;
}

static void by_ring(unsigned setup, unsigned char opcode, unsigned char entry_flags)
{
	int ring = open_ring(setup), fine = 0;
	struct io_uring_params *p = &ring_parameters;
	unsigned *tail = (void *)(submissions + p->sq_off.tail), *array = (void *)(submissions + p->sq_off.array);
	unsigned *flags = (void *)(submissions + p->sq_off.flags), *done = (void *)(completions + p->cq_off.tail);
	struct io_uring_cqe *results = (void *)(completions + p->cq_off.cqes);

	for (int i = 0; i < REQUESTS; i++) {
		memset(&entries[i], 0, sizeof(entries[i]));
		entries[i].opcode = opcode;
		entries[i].fd = fd;
		entries[i].addr = (unsigned long)(buffer + i * BLOCK);
		entries[i].len = BLOCK;
		entries[i].off = place(i);
		entries[i].flags = entry_flags;
		array[i] = i;
	}
	__atomic_store_n(tail, REQUESTS, __ATOMIC_RELEASE);
	if (!(setup & IORING_SETUP_SQPOLL))
		syscall(SYS_io_uring_enter, ring, REQUESTS, REQUESTS, IORING_ENTER_GETEVENTS, 0, 0);
	else if (__atomic_load_n(flags, __ATOMIC_ACQUIRE) & IORING_SQ_NEED_WAKEUP)
		syscall(SYS_io_uring_enter, ring, 0, 0, IORING_ENTER_SQ_WAKEUP, 0, 0);
	while (__atomic_load_n(done, __ATOMIC_ACQUIRE) < REQUESTS)
		usleep(100);
	for (int i = 0; i < REQUESTS; i++)
		fine += results[i].res == BLOCK;
	need(fine == REQUESTS, "io_uring");
	close(ring);
}

static void reopen(int flags)
{
	close(fd);
	fd = open(path, flags);
	need(fd >= 0, "open");
}

static void in_order(void (*one)(int))
{
	for (int i = 0; i < REQUESTS; i++)
		one(i);
}

static void *thread(void *argument)
{
	long mine = (long)argument;

	for (int i = mine; i < REQUESTS; i += 4)
		need(pread(fd, buffer + mine * BLOCK, BLOCK, place(i)) == BLOCK, "pread");
	return NULL;
}

static void by_threads(void)
{
	pthread_t threads[4];

	for (long i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, thread, (void *)i);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
}

static void by_child(void)
{
	int status;

	if (fork() == 0) {
		in_order(one_pread);
		_exit(0);
	}
	wait(&status);
	need(status == 0, "child");
}

static ssize_t append(void) { return write(fd, buffer, BLOCK); }
static ssize_t append_with_place(void) { return pwrite(fd, buffer, BLOCK, 0); }
static ssize_t append_with_flag(void) { return pwritev2(fd, halves(), 2, 0, 0x10 /* RWF_APPEND */); }

static void by_appending(int flags, ssize_t (*one)(void))
{
	reopen(O_WRONLY | flags);
	for (int i = 0; i < REQUESTS; i++)
		need(one() == BLOCK, "write");
}

/* Reads the whole file, 256 KiB at a time. */
static void sequentially(void)
{
	for (off_t at = 0; at < SIZE; at += 64 * BLOCK)
		need(pread(fd, buffer, 64 * BLOCK, at) == 64 * BLOCK, "pread");
}

/* More requests than fit the ring: two blocks alternately, so that no request is adjacent to the previous one. */
static void often(void)
{
	for (int i = 0; i < 400000; i++)
		one_pread(i & 1);
}

/* Every page of a mapping in order, three times, each time in a new mapping. */
static void scan(void)
{
	for (int pass = 0; pass < 3; pass++) {
		volatile char *memory = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);

		need(memory != MAP_FAILED, "mmap");
		for (off_t at = 0; at < SIZE; at += BLOCK)
			buffer[0] = memory[at];
		munmap((void *)memory, SIZE);
	}
}

static void unaligned(void)
{
	for (off_t at = 0; at < 10000 * 40; at += 10000)
		need(pread(fd, buffer, 10000, at) == 10000, "pread");
}

/* The whole file, in requests that share their first and last blocks with their neighbors. */
static void unaligned_passes(void)
{
	for (int pass = 0; pass < 50; pass++)
		for (off_t at = 0; at + 10000 <= SIZE; at += 10000)
			need(pread(fd, buffer, 10000, at) == 10000, "pread");
}

/* One block at a time, with pauses in which the flush copies the run. */
static void slowly(void)
{
	for (off_t at = 0; at < 64 * BLOCK; at += BLOCK) {
		need(pread(fd, buffer, BLOCK, at) == BLOCK, "pread");
		usleep(6000);
	}
}

static void do_it(const char *way)
{
	static const struct { const char *name; void (*one)(int); } simple[] = {
		{ "read", one_read }, { "pread", one_pread }, { "readv", one_readv }, { "preadv", one_preadv },
		{ "preadv2", one_preadv2 }, { "sendfile", one_sendfile }, { "splice", one_splice }, { "mmap", one_load },
		{ "write", one_write }, { "pwrite", one_pwrite }, { "writev", one_writev }, { "pwritev", one_pwritev },
		{ "pwritev2", one_pwritev2 }, { "pwritev2-at-position", one_pwritev2_at_position },
	};

	for (unsigned i = 0; i < sizeof(simple) / sizeof(simple[0]); i++)
		if (!strcmp(way, simple[i].name)) {
			in_order(simple[i].one);
			return;
		}
	if (!strcmp(way, "uring"))
		by_ring(0, IORING_OP_READ, 0);
	else if (!strcmp(way, "uring-async"))
		by_ring(0, IORING_OP_READ, IOSQE_ASYNC);
	else if (!strcmp(way, "uring-sqpoll"))
		by_ring(IORING_SETUP_SQPOLL, IORING_OP_READ, 0);
	else if (!strcmp(way, "uring-direct"))
		reopen(O_RDONLY | O_DIRECT), by_ring(0, IORING_OP_READ, 0);
	else if (!strcmp(way, "uring-write"))
		by_ring(0, IORING_OP_WRITE, 0);
	else if (!strcmp(way, "direct"))
		reopen(O_RDONLY | O_DIRECT), in_order(one_pread);
	else if (!strcmp(way, "direct-write"))
		reopen(O_RDWR | O_DIRECT), in_order(one_pwrite);
	else if (!strcmp(way, "msync"))
		in_order(one_store), need(msync((void *)mapped(0), SIZE, MS_SYNC) == 0, "msync");
	else if (!strcmp(way, "threads"))
		by_threads();
	else if (!strcmp(way, "fork"))
		by_child();
	else if (!strcmp(way, "append"))
		by_appending(O_APPEND, append);
	else if (!strcmp(way, "append-with-place"))
		by_appending(O_APPEND, append_with_place);
	else if (!strcmp(way, "append-with-flag"))
		by_appending(0, append_with_flag);
	else if (!strcmp(way, "often"))
		often();
	else if (!strcmp(way, "scan"))
		scan();
	else if (!strcmp(way, "unaligned"))
		unaligned();
	else if (!strcmp(way, "unaligned passes"))
		unaligned_passes();
	else if (!strcmp(way, "slowly"))
		slowly();
	else if (!strcmp(way, "sequential"))
		sequentially();
	else
		exit(2);
}

int main(int count, char **arguments)
{
	if (count != 3)
		return 2;
	path = arguments[1];
	buffer = aligned_alloc(BLOCK, 64 * BLOCK);
	memset(buffer, 1, 64 * BLOCK);
	fd = open(path, O_RDWR);
	need(fd >= 0, "open");
	getchar();
	do_it(arguments[2]);
	puts("ok");
	return 0;
}

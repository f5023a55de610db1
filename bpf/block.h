/* Requests to block devices, from submission to completion, with the file and block of their first page. */
#ifndef LLMCACHE_BLOCK_H
#define LLMCACHE_BLOCK_H

#include "accesses.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct record);
} requests SEC(".maps");

#define MERGED_BIOS 256	/* most drivers merge fewer bios into a request */

/* Finds the page-cache page at the start of a request; anonymous memory (O_DIRECT) has none. */
static __always_inline bool match_file(struct record *record, struct bio *bio)
{
	u32 index = BPF_CORE_READ(bio, bi_iter.bi_idx), done = BPF_CORE_READ(bio, bi_iter.bi_bvec_done), offset = 0;
	void *vector = (void *)BPF_CORE_READ(bio, bi_io_vec) + index * bpf_core_type_size(struct bio_vec);
	struct page *page = NULL;
	struct address_space *mapping;
	struct folio *folio;
	struct inode *inode;
	u64 head;

	bpf_probe_read_kernel(&page, sizeof(page), vector + bpf_core_field_offset(struct bio_vec, bv_page));
	bpf_probe_read_kernel(&offset, sizeof(offset), vector + bpf_core_field_offset(struct bio_vec, bv_offset));
	if (!page)
		return false;
	head = BPF_CORE_READ(page, compound_head);
	folio = head & 1 ? (void *)(head - 1) : (void *)page;
	mapping = BPF_CORE_READ(folio, mapping);
	if (!mapping || (u64)mapping & 3)
		return false;
	inode = BPF_CORE_READ(mapping, host);
	if (!inode || (BPF_CORE_READ(inode, i_mode) & S_IFMT) != S_IFREG)
		return false;
	record->inode = BPF_CORE_READ(inode, i_ino);
	record->dev = device_number(BPF_CORE_READ(inode, i_sb, s_dev));
	record->first = (BPF_CORE_READ(folio, index) + ((u64)page - (u64)folio) / bpf_core_type_size(struct page))
			<< config.page_blocks_log2;
	record->first += (offset + done) >> 12;
	record->flags = MATCHED;
	return true;
}

SEC("tp_btf/block_bio_queue")
int BPF_PROG(submitted, struct bio *bio)
{
	u32 operation = BPF_CORE_READ(bio, bi_opf) & 0xff, size = BPF_CORE_READ(bio, bi_iter.bi_size);
	struct thread *thread = this_thread();
	u64 key = (u64)bio;
	struct record request = {};
	struct file_key file;

	/* The end of an earlier request of this bio was missed: some kernels do not run BPF programs in an interrupt of a
	 * protected process. */
	if (!bpf_map_delete_elem(&requests, &key))
		lose(LOST_REQUESTS, 1);
	if (operation > WRITE || !size)
		return 0;
	if (match_file(&request, bio)) {
		file.dev = request.dev;
		file.inode = request.inode;
		if (!thread && !bpf_map_lookup_elem(&files, &file))
			return 0;
	} else {
		if (!thread)
			return 0;
		request.dev = device_number(BPF_CORE_READ(bio, bi_bdev, bd_dev));
		request.first = BPF_CORE_READ(bio, bi_iter.bi_sector) >> 3;
	}
	request.t_ns = bpf_ktime_get_ns();
	request.count = (size + 4095) >> 12;
	request.pid = thread ? thread->pid : 0;
	request.op = operation;
	request.miss = UNKNOWN;
	request.kind = BLOCK;
	if (bpf_map_update_elem(&requests, &key, &request, BPF_ANY))
		lose(LOST_REQUESTS, 1);
	return 0;
}

static __noinline int finish(u64 key)
{
	struct record *request = bpf_map_lookup_elem(&requests, &key);
	u64 now, latency_us;

	if (!request)
		return 0;
	now = bpf_ktime_get_ns();
	latency_us = (now - request->t_ns) / 1000;
	request->t_ns = now;
	request->aux = latency_us > 0xffffffff ? 0xffffffff : latency_us;
	emit(request);
	bpf_map_delete_elem(&requests, &key);
	return 0;
}

/* For drivers that process bios directly. */
SEC("tp_btf/block_bio_complete")
int BPF_PROG(completed, struct request_queue *queue, struct bio *bio)
{
	return finish((u64)bio);
}

/* For all other drivers: a request consists of one or more bios, and its first `bytes` are complete. */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(request_completed, struct request *request, int error, unsigned int bytes)
{
	struct bio *bio = BPF_CORE_READ(request, bio);

	for (int i = 0; i < MERGED_BIOS && bio; i++) {
		u32 size = BPF_CORE_READ(bio, bi_iter.bi_size);

		if (size > bytes)
			break;
		bytes -= size;
		finish((u64)bio);
		bio = BPF_CORE_READ(bio, bi_next);
	}
	return 0;
}

#endif

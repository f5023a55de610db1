/* Pages that leave the page cache, by reclaim, truncation or request. Runs are kept per CPU, because any process may evict. */
#ifndef LLMCACHE_EVICTIONS_H
#define LLMCACHE_EVICTIONS_H

#include "accesses.h"

#define CPUS 1024
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CPUS);
	__type(key, u32);
	__type(value, struct slot);
} evictions SEC(".maps");

SEC("tp_btf/mm_filemap_delete_from_page_cache")
int BPF_PROG(evicted, struct folio *folio)
{
	struct inode *inode = folio->mapping->host;
	u32 cpu = bpf_get_smp_processor_id() & (CPUS - 1);
	struct slot *slot = bpf_map_lookup_elem(&evictions, &cpu);
	struct record next = {};
	struct file_key file;

	name_file(&next, inode);
	file.dev = next.dev;
	file.inode = next.inode;
	if (!slot || !bpf_map_lookup_elem(&files, &file))
		return 0;
	next.t_ns = bpf_ktime_get_ns();
	next.first = (u64)folio->index << config.page_blocks_log2;
	next.count = folio_pages(folio) << config.page_blocks_log2;
	next.miss = UNKNOWN;
	next.kind = EVICT;
	merge(slot, &next, 0);
	return 0;
}

#endif

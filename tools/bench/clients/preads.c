/* preads FILE SECONDS BYTES [RATE]: prints "ready" and waits for a line. Then it reads the file from begin to end
 * repeatedly, BYTES at a time with pread, at most RATE times a second, and prints {"ops": N, "seconds": S}. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int count, char **words)
{
	if (count < 4)
		return 2;
	double seconds = atof(words[2]), begin, end;
	size_t bytes = atol(words[3]);
	double rate = count > 4 ? atof(words[4]) : 0;
	char *buffer = malloc(bytes);
	int file = open(words[1], O_RDONLY);
	struct stat status;
	unsigned long ops = 0;
	off_t offset = 0;

	if (file < 0 || fstat(file, &status) || !buffer)
		return 1;
	puts("ready");
	fflush(stdout);
	getchar();
	begin = end = now();
	while (end - begin < seconds) {
		/* Reading the clock takes as long as a small read. */
		for (int i = 0; i < (bytes > 65536 ? 8 : 256); i++, ops++) {
			if (pread(file, buffer, bytes, offset) != (ssize_t)bytes)
				return 1;
			offset += bytes;
			if (offset + (off_t)bytes > status.st_size)
				offset = 0;
		}
		end = now();
		while (rate && ops / rate > end - begin)
			end = now();
	}
	printf("{\"ops\": %lu, \"seconds\": %.6f}\n", ops, end - begin);
	return 0;
}

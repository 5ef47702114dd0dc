// A training job as storage sees it: worker processes read batches into a bounded queue, a loop takes one batch per
// iteration and computes (sleeps). With --compute-us 0 and many workers it is a greedy neighbour, with --write a
// writer. It logs its own truth, one line per iteration, and tells its queue to an agent like agent/hint.py does.
//
// Usage: trainer --path DEVICE_OR_FILE --span BYTES --log FILE [options below]; sizes in bytes, times as named.
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_WORKERS = 256, MAX_RESTARTS = 32, RESTART_PAUSE_MS = 1000, WAITING_AFTER_MS = 10 };

// ---- settings

static struct {
	char *path, *slow_path, *log, *cgroup;
	uint64_t offset, span, slow_offset, slow_span, read_size, zero_ns, seed;
	uint64_t batch_reads, workers, queue, compute_us, prepare_cpu_us, cold_batches, cold_factor;
	uint64_t burst_every, burst_length, burst_factor, start_ms, stop_ms, slow_permille;
	uint64_t random, buffered, write, hints;
	uint64_t restarts_ms[MAX_RESTARTS];
	int restarts;
} set = { .read_size = 256 << 10, .batch_reads = 8, .workers = 4, .queue = 8, .cold_factor = 1, .burst_factor = 1,
	  .stop_ms = 40000 };

struct setting {
	const char *name;
	uint64_t *number;
	char **text;
};

static const struct setting settings[] = {
	{ "path", NULL, &set.path },
	{ "slow-path", NULL, &set.slow_path },
	{ "log", NULL, &set.log },
	{ "cgroup", NULL, &set.cgroup }, // a cgroup folder to join first
	{ "offset", &set.offset, NULL }, // the job reads [offset, offset + span) of path
	{ "span", &set.span, NULL },
	{ "slow-offset", &set.slow_offset, NULL },
	{ "slow-span", &set.slow_span, NULL },
	{ "slow-permille", &set.slow_permille, NULL }, // how many of 1,000 reads go to slow-path
	{ "read-size", &set.read_size, NULL },
	{ "batch-reads", &set.batch_reads, NULL },
	{ "workers", &set.workers, NULL },
	{ "queue", &set.queue, NULL }, // batches being read or ready, at most
	{ "compute-us", &set.compute_us, NULL },
	{ "prepare-cpu-us", &set.prepare_cpu_us, NULL }, // worker CPU time per batch
	{ "cold-batches", &set.cold_batches, NULL },
	{ "cold-factor", &set.cold_factor, NULL },
	{ "burst-every", &set.burst_every, NULL },
	{ "burst-length", &set.burst_length, NULL },
	{ "burst-factor", &set.burst_factor, NULL },
	{ "zero-ns", &set.zero_ns, NULL }, // CLOCK_MONOTONIC at the scenario's time 0; default: now
	{ "start-ms", &set.start_ms, NULL },
	{ "stop-ms", &set.stop_ms, NULL },
	{ "seed", &set.seed, NULL },
	{ "random", &set.random, NULL }, // flags: 0 or 1
	{ "buffered", &set.buffered, NULL },
	{ "write", &set.write, NULL },
	{ "hints", &set.hints, NULL },
};
enum { SETTINGS = sizeof(settings) / sizeof(settings[0]), RESTART = SETTINGS };

static uint64_t parse_number(const char *name, const char *text)
{
	char *end;
	errno = 0;
	uint64_t value = strtoull(text, &end, 10);
	if (errno || *end || !*text)
		errx(2, "--%s %s is no number", name, text);
	return value;
}

static void parse_arguments(int argc, char **argv)
{
	struct option options[SETTINGS + 2] = { 0 };
	int index;

	for (int i = 0; i < SETTINGS; i++)
		options[i] = (struct option){ settings[i].name, required_argument, NULL, 0 };
	options[RESTART] = (struct option){ "restart-ms", required_argument, NULL, 0 };
	while ((index = -1, getopt_long(argc, argv, "", options, &index)) == 0) {
		if (index == RESTART && set.restarts < MAX_RESTARTS)
			set.restarts_ms[set.restarts++] = parse_number("restart-ms", optarg);
		else if (index < SETTINGS && settings[index].text)
			*settings[index].text = optarg;
		else if (index < SETTINGS)
			*settings[index].number = parse_number(settings[index].name, optarg);
	}
	if (optind != argc || !set.path || !set.log || set.span < set.read_size || !set.read_size)
		errx(2, "give --path, --log and a --span of at least --read-size");
	if (!set.workers || set.workers > MAX_WORKERS || !set.queue || !set.batch_reads)
		errx(2, "--workers is 1..%d, --queue and --batch-reads at least 1", MAX_WORKERS);
}

// ---- time, chance

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static struct timespec timespec_of(uint64_t ns)
{
	return (struct timespec){ .tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000 };
}

static void sleep_until(uint64_t ns)
{
	struct timespec t = timespec_of(ns);
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
		;
}

static uint64_t chance(uint64_t *state) // splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15ull;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

// ---- what the loop and its workers share

static struct shared {
	pthread_mutex_t lock;
	pthread_cond_t produced, consumed;
	uint64_t next_batch, taken, ready; // of this life
	uint64_t next_read; // of the sequential pattern, over all lives
	atomic_bool stop;
	_Atomic uint64_t reads, bytes, read_us, longest_read_us; // over all lives
} *shared;

static void make_shared(void)
{
	pthread_mutexattr_t mutex;
	pthread_condattr_t condition;

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		err(1, "mmap");
	pthread_mutexattr_init(&mutex);
	pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
	pthread_mutex_init(&shared->lock, &mutex);
	pthread_condattr_init(&condition);
	pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
	pthread_condattr_setclock(&condition, CLOCK_MONOTONIC);
	pthread_cond_init(&shared->produced, &condition);
	pthread_cond_init(&shared->consumed, &condition);
}

static uint64_t batch_reads(uint64_t batch)
{
	if (batch < set.cold_batches)
		return set.batch_reads * set.cold_factor;
	if (set.burst_every && batch % set.burst_every < set.burst_length)
		return set.batch_reads * set.burst_factor;
	return set.batch_reads;
}

// ---- workers

struct source {
	int fd;
	uint64_t offset, blocks;
};

static struct source open_source(const char *path, uint64_t offset, uint64_t span)
{
	int flags = (set.write ? O_WRONLY : O_RDONLY) | (set.buffered ? 0 : O_DIRECT) | O_CLOEXEC;
	struct source source = { open(path, flags), offset, span / set.read_size };

	if (source.fd < 0)
		err(1, "%s", path);
	return source;
}

static void transfer(const struct source *source, uint64_t block, void *buffer)
{
	off_t at = source->offset + block % source->blocks * set.read_size;
	uint64_t began = now_ns();
	ssize_t done = set.write ? pwrite(source->fd, buffer, set.read_size, at) :
				   pread(source->fd, buffer, set.read_size, at);
	uint64_t us = (now_ns() - began) / 1000;

	if (done != (ssize_t)set.read_size)
		err(1, "%zd of %llu bytes at %lld", done, (unsigned long long)set.read_size, (long long)at);
	atomic_fetch_add(&shared->reads, 1);
	atomic_fetch_add(&shared->bytes, done);
	atomic_fetch_add(&shared->read_us, us);
	uint64_t longest = atomic_load(&shared->longest_read_us);
	while (us > longest && !atomic_compare_exchange_weak(&shared->longest_read_us, &longest, us))
		;
}

static void burn_cpu(uint64_t us)
{
	struct timespec t;
	uint64_t began;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	began = t.tv_sec * 1000000ull + t.tv_nsec / 1000;
	do
		clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	while (t.tv_sec * 1000000ull + t.tv_nsec / 1000 - began < us);
}

// Gives the number of the next batch to read and the place of its first read; false when the life is over.
static bool next_batch(uint64_t *batch, uint64_t *first_read)
{
	pthread_mutex_lock(&shared->lock);
	while (!shared->stop && shared->next_batch - shared->taken >= set.queue)
		pthread_cond_wait(&shared->consumed, &shared->lock);
	*batch = shared->next_batch;
	*first_read = shared->next_read;
	if (!shared->stop) {
		shared->next_batch++;
		shared->next_read += batch_reads(*batch);
	}
	bool alive = !shared->stop;
	pthread_mutex_unlock(&shared->lock);
	return alive;
}

static void work(uint64_t life, uint64_t worker)
{
	struct source fast = open_source(set.path, set.offset, set.span), slow = fast;
	uint64_t state = set.seed * 1000003 + life * 10007 + worker, batch, first;
	void *buffer = NULL;

	prctl(PR_SET_NAME, "pt_data_worker"); // as PyTorch calls them: that is how an agent knows workers
	if (set.slow_path)
		slow = open_source(set.slow_path, set.slow_offset, set.slow_span);
	if (posix_memalign(&buffer, 4096, set.read_size))
		errx(1, "no memory");
	memset(buffer, 0x5a, set.read_size);
	while (next_batch(&batch, &first)) {
		uint64_t count = batch_reads(batch);
		for (uint64_t i = 0; i < count && !shared->stop; i++) {
			bool elsewhere = set.slow_permille && chance(&state) % 1000 < set.slow_permille;
			transfer(elsewhere ? &slow : &fast, set.random ? chance(&state) : first + i, buffer);
		}
		if (set.prepare_cpu_us)
			burn_cpu(set.prepare_cpu_us);
		pthread_mutex_lock(&shared->lock);
		shared->ready++;
		pthread_cond_signal(&shared->produced);
		pthread_mutex_unlock(&shared->lock);
	}
}

// ---- hints: the wire format stands in agent/hint.py

enum { CAPACITY_KNOWN = 1 << 1, BYTES_KNOWN = 1 << 2, WAIT_KNOWN = 1 << 3, WAITING = 1 << 4, DONE = 1 << 6 };

struct hint {
	char magic[4];
	uint32_t flags, stream, depth, capacity, missed;
	uint64_t next_batch_bytes, wait_ns;
} __attribute__((packed));

static void send_hint(uint32_t flags, uint32_t depth, uint64_t next_batch_bytes, uint64_t wait_ns)
{
	static int fd = -1;
	static uint64_t next_attempt;
	static uint32_t missed;
	struct hint hint = { "PFH1", flags, 0, depth, set.queue, missed, next_batch_bytes, wait_ns };

	if (!set.hints)
		return;
	if (fd < 0 && now_ns() >= next_attempt) {
		struct sockaddr_un address = { .sun_family = AF_UNIX };
		const char *path = getenv("PREFETCHD_HINT_SOCKET");
		next_attempt = now_ns() + 1000000000;
		strncpy(address.sun_path, path ? path : "/run/prefetchd/hint.sock", sizeof(address.sun_path) - 1);
		fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
			close(fd);
			fd = -1;
		}
	}
	if (fd < 0)
		return;
	bool iteration = !(flags & (WAITING | DONE));
	if (send(fd, &hint, sizeof(hint), MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof(hint)) {
		missed = 0;
	} else if (errno == EAGAIN || errno == ENOBUFS) {
		missed += iteration;
	} else {
		close(fd);
		fd = -1;
	}
}

// ---- the training loop

// Waits until a batch is ready, at most until `end_ns`; tells the agent once where the wait is long.
static bool wait_for_batch(uint64_t began, uint64_t end_ns)
{
	bool told = false;

	while (!shared->ready && now_ns() < end_ns) {
		struct timespec until = timespec_of(told ? end_ns : began + WAITING_AFTER_MS * 1000000ull);
		pthread_cond_timedwait(&shared->produced, &shared->lock, &until);
		if (!shared->ready && !told && now_ns() - began >= WAITING_AFTER_MS * 1000000ull) {
			send_hint(WAITING | WAIT_KNOWN, 0, 0, now_ns() - began);
			told = true;
		}
	}
	return shared->ready;
}

static void train(FILE *log, int life, uint64_t end_ns)
{
	uint64_t state = set.seed * 31 + life;

	while (now_ns() < end_ns) {
		uint64_t began = now_ns();
		pthread_mutex_lock(&shared->lock);
		uint64_t depth = shared->ready;
		bool got = wait_for_batch(began, end_ns);
		if (got) {
			shared->ready--;
			shared->taken++;
			pthread_cond_signal(&shared->consumed);
		}
		uint64_t left = shared->ready, next = batch_reads(shared->next_batch) * set.read_size;
		pthread_mutex_unlock(&shared->lock);
		uint64_t wait_ns = now_ns() - began;
		if (got)
			send_hint(CAPACITY_KNOWN | BYTES_KNOWN | WAIT_KNOWN, left, next, wait_ns);
		fprintf(log, "%.4f %.3f %llu %d %d %llu\n", (began - set.zero_ns) / 1e9, wait_ns / 1e6,
			(unsigned long long)depth, life, got, (unsigned long long)atomic_load(&shared->bytes));
		if (set.compute_us) // within 5 % of its nominal time
			sleep_until(now_ns() + set.compute_us * (950 + chance(&state) % 100));
	}
	send_hint(DONE, 0, 0, 0);
}

static pid_t spawn(void)
{
	pid_t parent = getpid(), child = fork();

	if (child < 0)
		err(1, "fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(1);
	}
	return child;
}

// One life of the job, from a start to a restart or the end: in the real world a process of its own, so here as well.
static void live(FILE *log, int life, uint64_t end_ns)
{
	pid_t workers[MAX_WORKERS];

	for (uint64_t i = 0; i < set.workers; i++) {
		workers[i] = spawn();
		if (!workers[i]) {
			work(life, i);
			_exit(0);
		}
	}
	train(log, life, end_ns);
	fflush(log);
	pthread_mutex_lock(&shared->lock);
	shared->stop = true;
	pthread_cond_broadcast(&shared->consumed);
	pthread_mutex_unlock(&shared->lock);
	int failed = 0, status;
	for (uint64_t i = 0; i < set.workers; i++)
		failed |= waitpid(workers[i], &status, 0) != workers[i] || status;
	_exit(failed);
}

static int wait_for_life(pid_t child)
{
	int status;

	if (waitpid(child, &status, 0) != child)
		err(1, "waitpid");
	return status;
}

static void join_cgroup(const char *folder)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/cgroup.procs", folder);
	FILE *file = fopen(path, "w");
	if (!file || fprintf(file, "%d", getpid()) < 0 || fclose(file))
		err(1, "%s", path);
}

int main(int argc, char **argv)
{
	int status = 0;

	parse_arguments(argc, argv);
	if (set.cgroup)
		join_cgroup(set.cgroup);
	if (!set.zero_ns)
		set.zero_ns = now_ns();
	make_shared();
	FILE *log = fopen(set.log, "w");
	if (!log)
		err(1, "%s", set.log);
	setlinebuf(log);
	fprintf(log, "# time_s wait_ms depth_before life taken bytes_total\n");
	sleep_until(set.zero_ns + set.start_ms * 1000000);
	for (int life = 0; life <= set.restarts && !status; life++) {
		uint64_t end_ms = life < set.restarts ? set.restarts_ms[life] : set.stop_ms;
		if (end_ms > set.stop_ms)
			end_ms = set.stop_ms;
		if (life)
			sleep_until(now_ns() + RESTART_PAUSE_MS * 1000000ull);
		shared->next_batch = shared->taken = shared->ready = 0;
		shared->stop = false;
		pid_t child = spawn();
		if (!child)
			live(log, life, set.zero_ns + end_ms * 1000000);
		status = wait_for_life(child);
	}
	uint64_t reads = atomic_load(&shared->reads);
	fprintf(log, "# end reads=%llu bytes=%llu read_ms_mean=%.3f read_ms_max=%.3f lives=%d\n",
		(unsigned long long)reads, (unsigned long long)atomic_load(&shared->bytes),
		reads ? atomic_load(&shared->read_us) / 1e3 / reads : 0.0,
		atomic_load(&shared->longest_read_us) / 1e3, set.restarts + 1);
	fclose(log);
	return status ? 1 : 0;
}

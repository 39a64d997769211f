// Records every change of files below a directory, in order: preload it into a process (LD_PRELOAD).
//
// SHADOW_ROOT is the directory, SHADOW_LOG the file of records. A record is
//     u32 length of the head, u64 length of the data, the head (fields separated by \x1f), the data
// and is appended after the call has returned. One mutex around call and record makes their order the same.
// `helpers/shadow_tree.py` replays the records; what is not recorded here shows there as a difference from the disk.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <string>

namespace {

std::recursive_mutex mutex;
int log_file = -1;
std::string root;

template <typename Function>
Function real(const char* name, Function) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static auto call = real(#name, &::name)

// Built after `root`, in the order of this file; before that nothing is recorded.
struct Start {
  Start() {
    const char* directory = getenv("SHADOW_ROOT");
    const char* path = getenv("SHADOW_LOG");
    if (!directory || !path) return;
    root = std::string(directory) + "/";
    log_file = real("open64", &::open64)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  }
} start;

std::string absolute(int directory, const char* path) {
  if (path[0] == '/') return path;
  char head[4096];
  ssize_t length = -1;
  if (directory == AT_FDCWD) {
    if (getcwd(head, sizeof head)) length = static_cast<ssize_t>(strlen(head));
  } else {
    length = readlink(("/proc/self/fd/" + std::to_string(directory)).c_str(), head, sizeof head);
  }
  return length < 0 ? path : std::string(head, static_cast<size_t>(length)) + "/" + path;
}

bool is_below(const std::string& path) { return log_file >= 0 && (path + "/").compare(0, root.size(), root) == 0; }

bool is_tracked(int file) {
  if (log_file < 0 || file == log_file) return false;
  char path[4096];
  ssize_t length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  return length > 0 && is_below(std::string(path, static_cast<size_t>(length)));
}

uint64_t inode_of(int file) {
  struct stat status;
  return fstat(file, &status) == 0 ? status.st_ino : 0;
}

uint64_t inode_at(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

void record(std::initializer_list<std::string> fields, const void* data = nullptr, size_t length = 0) {
  std::string head;
  for (const std::string& field : fields) head += (head.empty() ? "" : "\x1f") + field;
  uint32_t head_length = static_cast<uint32_t>(head.size());
  uint64_t data_length = length;
  std::string all(reinterpret_cast<char*>(&head_length), 4);
  all.append(reinterpret_cast<char*>(&data_length), 8).append(head);
  if (length) all.append(static_cast<const char*>(data), length);
  static auto call = real("write", &::write);
  if (call(log_file, all.data(), all.size()) != static_cast<ssize_t>(all.size())) abort();
}

void record_write(int file, const void* data, ssize_t length, off_t end) {
  if (length > 0)
    record({"write", std::to_string(inode_of(file)), std::to_string(end - length)}, data, static_cast<size_t>(length));
}

int opened(const std::string& path, int flags, int file) {
  if (file >= 0 && (flags & (O_CREAT | O_TRUNC)) && is_below(path) && !(flags & O_DIRECTORY))
    record({"open", path, std::to_string(inode_of(file)), flags & O_TRUNC ? "truncate" : ""});
  return file;
}

}  // namespace

extern "C" {

// A line of the program's own among the records.
void shadow_mark(const char* text) {
  std::lock_guard guard(mutex);
  if (log_file >= 0) record({"mark", text});
}

#define OPEN(name)                                                                \
  int name(const char* path, int flags, ...) {                                    \
    REAL(name);                                                                   \
    va_list rest;                                                                 \
    va_start(rest, flags);                                                        \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;       \
    va_end(rest);                                                                 \
    std::lock_guard guard(mutex);                                                 \
    return opened(absolute(AT_FDCWD, path), flags, call(path, flags, mode));      \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                                        \
  int name(int directory, const char* path, int flags, ...) {                              \
    REAL(name);                                                                             \
    va_list rest;                                                                           \
    va_start(rest, flags);                                                                  \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                 \
    va_end(rest);                                                                           \
    std::lock_guard guard(mutex);                                                           \
    return opened(absolute(directory, path), flags, call(directory, path, flags, mode));    \
  }
OPENAT(openat)
OPENAT(openat64)

FILE* fopen64(const char* path, const char* mode) {
  REAL(fopen64);
  std::lock_guard guard(mutex);
  FILE* file = call(path, mode);
  // Its writes go past this library: the difference from the disk tells.
  if (file && strchr(mode, 'w')) opened(absolute(AT_FDCWD, path), O_CREAT | O_TRUNC, fileno(file));
  return file;
}

ssize_t write(int file, const void* data, size_t length) {
  REAL(write);
  if (!is_tracked(file)) return call(file, data, length);
  std::lock_guard guard(mutex);
  ssize_t done = call(file, data, length);
  record_write(file, data, done, lseek(file, 0, SEEK_CUR));
  return done;
}

#define PWRITE(name, offset_t)                                                    \
  ssize_t name(int file, const void* data, size_t length, offset_t offset) {     \
    REAL(name);                                                                   \
    if (!is_tracked(file)) return call(file, data, length, offset);               \
    std::lock_guard guard(mutex);                                                 \
    ssize_t done = call(file, data, length, offset);                              \
    record_write(file, data, done, offset + done);                                \
    return done;                                                                  \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

void record_parts(int file, const struct iovec* parts, int count, ssize_t length, off_t end) {
  std::string all;
  for (int i = 0; i < count; ++i) all.append(static_cast<char*>(parts[i].iov_base), parts[i].iov_len);
  record_write(file, all.data(), length, end);
}

ssize_t writev(int file, const struct iovec* parts, int count) {
  REAL(writev);
  if (!is_tracked(file)) return call(file, parts, count);
  std::lock_guard guard(mutex);
  ssize_t done = call(file, parts, count);
  record_parts(file, parts, count, done, lseek(file, 0, SEEK_CUR));
  return done;
}

#define PWRITEV(name, offset_t)                                                             \
  ssize_t name(int file, const struct iovec* parts, int count, offset_t offset) {          \
    REAL(name);                                                                             \
    if (!is_tracked(file)) return call(file, parts, count, offset);                         \
    std::lock_guard guard(mutex);                                                           \
    ssize_t done = call(file, parts, count, offset);                                        \
    record_parts(file, parts, count, done, offset + done);                                  \
    return done;                                                                            \
  }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)
#define PWRITEV2(name, offset_t)                                                            \
  ssize_t name(int file, const struct iovec* parts, int count, offset_t offset, int flags) { \
    REAL(name);                                                                             \
    if (!is_tracked(file)) return call(file, parts, count, offset, flags);                  \
    std::lock_guard guard(mutex);                                                           \
    ssize_t done = call(file, parts, count, offset, flags);                                 \
    record_parts(file, parts, count, done, offset + done);                                  \
    return done;                                                                            \
  }
PWRITEV2(pwritev2, off_t)
PWRITEV2(pwritev64v2, off64_t)

// Copies in the kernel would hide the data: callers fall back to reading and writing.
ssize_t sendfile64(int out, int, off64_t*, size_t) {
  (void)out;
  errno = EINVAL;
  return -1;
}
ssize_t sendfile(int out, int, off_t*, size_t) {
  (void)out;
  errno = EINVAL;
  return -1;
}
ssize_t copy_file_range(int, off64_t*, int, off64_t*, size_t, unsigned) {
  errno = EXDEV;
  return -1;
}

#define TRUNCATE(name, offset_t)                                                                              \
  int name(int file, offset_t length) {                                                                       \
    REAL(name);                                                                                               \
    std::lock_guard guard(mutex);                                                                             \
    int failed = call(file, length);                                                                          \
    if (!failed && is_tracked(file))                                                                          \
      record({"truncate", std::to_string(inode_of(file)), std::to_string(length)});                           \
    return failed;                                                                                            \
  }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(name)                                                                              \
  int name(int file) {                                                                          \
    REAL(name);                                                                                 \
    std::lock_guard guard(mutex);                                                               \
    int failed = call(file);                                                                    \
    if (!failed && is_tracked(file)) record({"sync", std::to_string(inode_of(file))});         \
    return failed;                                                                              \
  }
SYNC(fsync)
SYNC(fdatasync)

int renameat(int from_directory, const char* from, int to_directory, const char* to) {
  REAL(renameat);
  std::lock_guard guard(mutex);
  std::string source = absolute(from_directory, from), target = absolute(to_directory, to);
  int failed = call(from_directory, from, to_directory, to);
  if (!failed && (is_below(source) || is_below(target))) record({"rename", source, target});
  return failed;
}
int rename(const char* from, const char* to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int linkat(int from_directory, const char* from, int to_directory, const char* to, int flags) {
  REAL(linkat);
  std::lock_guard guard(mutex);
  std::string source = absolute(from_directory, from), target = absolute(to_directory, to);
  int failed = call(from_directory, from, to_directory, to, flags);
  if (!failed && is_below(target)) record({"link", source, target});
  return failed;
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int symlinkat(const char* from, int directory, const char* to) {
  REAL(symlinkat);
  std::lock_guard guard(mutex);
  int failed = call(from, directory, to);
  if (!failed && is_below(absolute(directory, to))) record({"symlink", from, absolute(directory, to)});
  return failed;
}
int symlink(const char* from, const char* to) { return symlinkat(from, AT_FDCWD, to); }

int unlinkat(int directory, const char* path, int flags) {
  REAL(unlinkat);
  std::lock_guard guard(mutex);
  std::string whole = absolute(directory, path);
  int failed = call(directory, path, flags);
  if (!failed && is_below(whole)) record({"unlink", whole});
  return failed;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int remove(const char* path) {
  struct stat status;
  return unlinkat(AT_FDCWD, path, lstat(path, &status) == 0 && S_ISDIR(status.st_mode) ? AT_REMOVEDIR : 0);
}
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int directory, const char* path, mode_t mode) {
  REAL(mkdirat);
  std::lock_guard guard(mutex);
  std::string whole = absolute(directory, path);
  int failed = call(directory, path, mode);
  if (!failed && is_below(whole)) record({"mkdir", whole, std::to_string(inode_at(whole))});
  return failed;
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

}  // extern "C"

#include "verify.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <thread>

#ifdef MESHREC_WITH_OPENSSL
#include <openssl/evp.h>
#include <openssl/pem.h>
#endif

// From libmeshrec.so.
extern "C" uint32_t meshrec_crc32(uint32_t crc, const void* bytes, size_t length);
extern "C" int64_t meshrec_crc32_of_file(int file, int64_t offset, int64_t length, uint32_t crc);

namespace meshrec {
namespace {

// As BLOCK and _MAX_BYTES in meshrec/durable/digests.py.
constexpr std::int64_t kBlock = 1 << 22;
constexpr std::int64_t kMaxBytes = 1 << 28;
const std::string kCopyAgain =
    " Copy the package again from where it was exported, or export the model again.";

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

// An open regular file; closed by the destructor.
class File {
 public:
  // Without O_NONBLOCK, opening a pipe without a writer would block forever.
  explicit File(const std::string& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
    struct stat status{};
    if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      if (descriptor_ >= 0) ::close(descriptor_);
      fail(path + " cannot be read as a regular file." + kCopyAgain);
    }
    size_ = static_cast<std::int64_t>(status.st_size);
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  std::int64_t size() const { return size_; }
  std::int64_t num_blocks() const { return (size_ + kBlock - 1) / kBlock; }
  std::int64_t block_size(std::int64_t block) const { return std::min(kBlock, size_ - block * kBlock); }

 private:
  int descriptor_;
  std::int64_t size_ = 0;
};

// Calls `check` for every block in a file, with several threads. Returns whether all calls returned true.
bool check_blocks(const File& file, const std::function<bool(std::int64_t block)>& check) {
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> is_good{true};
  const auto work = [&] {
    for (std::int64_t block = next++; block < file.num_blocks() && is_good; block = next++) {
      if (!check(block)) is_good = false;
    }
  };
  const std::int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  // At most 8 threads, as in meshrec/durable/digests.py.
  for (std::int64_t t = 1; t < std::min({cores, file.num_blocks(), std::int64_t{8}}); ++t) {
    threads.emplace_back(work);
  }
  work();
  for (auto& thread : threads) thread.join();
  return is_good;
}

std::string content_of(const std::string& path) {
  const File file(path);
  if (file.size() > kMaxBytes) fail(path + " is larger than such a file can be." + kCopyAgain);
  std::string content(static_cast<std::size_t>(file.size()), '\0');
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t count =
        ::pread(file.descriptor(), content.data() + done, content.size() - done, static_cast<off_t>(done));
    if (count <= 0) fail(path + " ends too early." + kCopyAgain);
    done += static_cast<std::size_t>(count);
  }
  return content;
}

// Entry for a file in digests.txt or signature.txt.
struct Line {
  std::int64_t num_bytes = -1;
  std::string hash, checksums, name;
};

// Parses "file <bytes> <hash> [<checksums>] <name>" lines between the first line and the last line.
std::map<std::string, Line> parse(const std::string& content, const std::string& path,
                                  const std::string& first, bool has_checksums) {
  std::istringstream lines(content);
  std::string text;
  if (!std::getline(lines, text) || text != first)
    fail(path + " does not begin with '" + first + "'." + kCopyAgain);
  std::map<std::string, Line> found;
  while (std::getline(lines, text)) {
    std::istringstream words(text);
    std::string kind;
    Line line;
    words >> kind >> line.num_bytes >> line.hash;
    if (has_checksums) words >> line.checksums;
    words.get();  // the space before the name, which may contain spaces
    std::getline(words, line.name);
    if (words.fail() || kind != "file" || line.num_bytes < 0 || line.hash.size() != 64 || line.name.empty()) {
      fail(path + " has a damaged line: " + text.substr(0, 100) + "." + kCopyAgain);
    }
    const std::string name = line.name;
    if (!found.emplace(name, std::move(line)).second) fail(path + " names " + name + " twice." + kCopyAgain);
  }
  return found;
}

const Line& line_of(const std::map<std::string, Line>& lines, const std::string& name,
                    const std::string& path) {
  const auto found = lines.find(name);
  if (found == lines.end()) fail(path + " does not name " + name + "." + kCopyAgain);
  return found->second;
}

std::string hexadecimal(std::uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

}  // namespace

void verify_checksums(const std::string& folder, const std::vector<std::string>& names) {
  const std::string path = folder + "/digests.txt";
  const std::string content = content_of(path);
  constexpr std::size_t kLastLine = 13;  // "end ", 8 digits, the line break
  // A file shorter than the last line has an empty body, and fails the comparison.
  const std::size_t body = content.size() - std::min(content.size(), kLastLine);
  if (content.substr(body) != "end " + hexadecimal(meshrec_crc32(0, content.data(), body)) + "\n") {
    fail(path + " does not have the checksum that it was written with." + kCopyAgain);
  }
  const auto lines = parse(content.substr(0, body), path, "meshrec-digests 1", /*has_checksums=*/true);
  for (const auto& name : names) {
    const Line& line = line_of(lines, name, path);
    const File file(folder + "/" + name);
    const std::string checksums = line.checksums == "-" ? "" : line.checksums;
    // Sizes first, because `is_same` indexes the checksums by block.
    const bool is_sized =
        file.size() == line.num_bytes && checksums.size() == 8 * static_cast<std::size_t>(file.num_blocks());
    const auto is_same = [&](std::int64_t block) {
      const std::int64_t crc =
          meshrec_crc32_of_file(file.descriptor(), block * kBlock, file.block_size(block), 0);
      return crc >= 0 && checksums.compare(static_cast<std::size_t>(8 * block), 8,
                                           hexadecimal(static_cast<std::uint32_t>(crc))) == 0;
    };
    if (!is_sized || !check_blocks(file, is_same)) {
      fail(folder + "/" + name + " is not what was written: its size or a checksum is another." + kCopyAgain);
    }
  }
}

#ifdef MESHREC_WITH_OPENSSL
namespace {

using Digest = std::array<unsigned char, 32>;

Digest sha256(const void* bytes, std::size_t length) {
  Digest found{};
  unsigned int size = 0;
  if (EVP_Digest(bytes, length, found.data(), &size, EVP_sha256(), nullptr) != 1)
    fail("OpenSSL has no SHA-256.");
  return found;
}

// Returns the SHA-256 over the SHA-256 digests of all blocks in a file, in hexadecimal; empty if the file
// cannot be read.
std::string tree_hash(const File& file) {
  std::vector<Digest> digests(static_cast<std::size_t>(file.num_blocks()));
  const auto hash = [&](std::int64_t block) {
    static thread_local std::vector<unsigned char> buffer(kBlock);
    const std::int64_t size = file.block_size(block);
    for (std::int64_t done = 0; done < size;) {
      const ssize_t count =
          ::pread(file.descriptor(), buffer.data() + done, static_cast<std::size_t>(size - done),
                  static_cast<off_t>(block * kBlock + done));
      if (count <= 0) return false;
      done += count;
    }
    digests[static_cast<std::size_t>(block)] = sha256(buffer.data(), static_cast<std::size_t>(size));
    return true;
  };
  if (!check_blocks(file, hash)) return "";
  std::string text;
  for (const unsigned char byte : sha256(digests.data(), digests.size() * sizeof(Digest))) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", byte);
    text += pair;
  }
  return text;
}

bool is_signed(const std::string& statement, const std::string& digits, const std::string& public_key) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(public_key.c_str(), "r"), std::fclose);
  if (file == nullptr) fail(public_key + " cannot be opened. Name the PEM file of a public key.");
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(
      PEM_read_PUBKEY(file.get(), nullptr, nullptr, nullptr), EVP_PKEY_free);
  if (key == nullptr || EVP_PKEY_id(key.get()) != EVP_PKEY_ED25519) {
    fail(public_key + " holds no ed25519 public key. Write it with: openssl pkey -in key.pem -pubout");
  }
  std::vector<unsigned char> signature;
  for (std::size_t at = 0; at < digits.size(); at += 2) {
    signature.push_back(static_cast<unsigned char>(std::stoi(digits.substr(at, 2), nullptr, 16)));
  }
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  return context != nullptr &&
         EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         EVP_DigestVerify(context.get(), signature.data(), signature.size(),
                          reinterpret_cast<const unsigned char*>(statement.data()), statement.size()) == 1;
}

}  // namespace

void verify_signature(const std::string& folder, const std::vector<std::string>& names,
                      const std::string& public_key) {
  const std::string path = folder + "/signature.txt";
  if (::access(path.c_str(), R_OK) != 0) {
    fail(folder + " is not signed, and a signature is required. Export the model with --sign KEY.");
  }
  const std::string content = content_of(path);
  constexpr std::size_t kLastLine = 8 + 128 + 1;  // "ed25519 ", the digits, the line break
  const std::size_t body = content.size() - std::min(content.size(), kLastLine);
  std::smatch match;
  const std::string last = content.substr(body);
  static const std::regex form("ed25519 ([0-9a-f]{128})\n");
  if (!std::regex_match(last, match, form) || !is_signed(content.substr(0, body), match[1], public_key)) {
    fail(path + " was not made by the private key of " + public_key +
         ". Use a package that its owner signed.");
  }
  const auto lines = parse(content.substr(0, body), path, "meshrec-signature 1", /*has_checksums=*/false);
  for (const auto& name : names) {
    const Line& line = line_of(lines, name, path);
    const File file(folder + "/" + name);
    if (file.size() != line.num_bytes || tree_hash(file) != line.hash) {
      fail(folder + "/" + name + " is not the file that was signed." + kCopyAgain);
    }
  }
}
#else
void verify_signature(const std::string&, const std::vector<std::string>&, const std::string&) {
  fail(
      "This library was built without OpenSSL, which checks signatures. Install OpenSSL's headers, and build "
      "it again.");
}
#endif

}  // namespace meshrec

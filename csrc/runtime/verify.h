// Checks that the files in a package are unchanged, and that a key signed them.
#pragma once

#include <string>
#include <vector>

namespace meshrec {

// Compares files in a package with digests.txt: sizes, and a CRC-32 per 4 MiB block. Detects accidental
// damage. Throws std::runtime_error, which names the first file that differs.
void verify_checksums(const std::string& folder, const std::vector<std::string>& names);

// Checks that the ed25519 key in a PEM file signed these files (signature.txt), which also detects forgery.
// Throws std::runtime_error if not, or if this library was built without OpenSSL.
void verify_signature(const std::string& folder, const std::vector<std::string>& names,
                      const std::string& public_key);

}  // namespace meshrec

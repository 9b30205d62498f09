// The check that a package's files are those that were written, and that a key signed them.
#pragma once

#include <string>
#include <vector>

namespace meshrec {

// Compare files of a package with digests.txt: their sizes, and the CRC-32 of each block of 4 MiB. Finds
// accidents. Throws std::runtime_error, which names the first file that differs.
void verify_checksums(const std::string& folder, const std::vector<std::string>& names);

// Check that the ed25519 key in a PEM file signed these files (signature.txt), which finds forgers, too.
// Throws std::runtime_error if not, and if this library was built without OpenSSL.
void verify_signature(const std::string& folder, const std::vector<std::string>& names,
                      const std::string& public_key);

}  // namespace meshrec

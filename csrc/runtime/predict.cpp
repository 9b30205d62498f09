// meshrec-predict [--require-signature KEY] [--no-verify] [--copy-weights] FOLDER [FILE]: scores the requests
// in a file (or standard input) and prints a line for each.
//
// A line is a sample: dense values, then for each feature in the package a bar and IDs, all separated by
// spaces. "0.5 1.25 | 17 3 | | 9" has two dense values, and three features with 2, 0 and 1 IDs. All lines are
// scored in a single batch. A score is printed with enough digits to recover the same float.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

#include "predictor.h"

namespace {

struct Requests {
  std::int64_t batch = 0;
  std::vector<float> dense;
  std::vector<std::vector<std::int64_t>> ids, lengths;
};

Requests read(std::istream& lines, const meshrec::Predictor& predictor) {
  Requests found;
  found.ids.resize(predictor.features().size());
  found.lengths.resize(predictor.features().size());
  for (std::string line; std::getline(lines, line); ++found.batch) {
    std::istringstream parts(line);
    std::string part;
    std::getline(parts, part, '|');
    std::istringstream values(part);
    std::int64_t num_dense = 0;
    for (float value = 0; values >> value; ++num_dense) found.dense.push_back(value);
    if (num_dense != predictor.num_dense() || !values.eof()) {
      throw std::runtime_error("line " + std::to_string(found.batch + 1) + ": needs " +
                               std::to_string(predictor.num_dense()) + " dense values before the first bar.");
    }
    for (std::size_t feature = 0; feature < found.ids.size(); ++feature) {
      // getline fails for an empty last part, which is allowed: the feature then has no IDs.
      if (!std::getline(parts, part, '|') && !(feature + 1 == found.ids.size() && line.back() == '|')) {
        throw std::runtime_error("line " + std::to_string(found.batch + 1) + ": has no ids of feature '" +
                                 predictor.features()[feature] + "'; write a bar for each feature.");
      }
      if (parts.fail()) part.clear();
      std::istringstream ids(part);
      std::int64_t count = 0;
      for (std::int64_t id = 0; ids >> id; ++count) found.ids[feature].push_back(id);
      if (!ids.eof()) {
        throw std::runtime_error("line " + std::to_string(found.batch + 1) + ": an id of feature '" +
                                 predictor.features()[feature] + "' is no whole number.");
      }
      found.lengths[feature].push_back(count);
    }
  }
  return found;
}

}  // namespace

int main(int count, char** arguments) {
  meshrec::Options options;
  std::vector<std::string> places;
  bool is_understood = true;
  for (int at = 1; at < count; ++at) {
    const std::string argument = arguments[at];
    if (argument == "--require-signature" && at + 1 < count) {
      options.public_key = arguments[++at];
    } else if (argument == "--no-verify") {
      options.verify = false;
    } else if (argument == "--copy-weights") {
      options.copy_weights = true;
    } else {
      is_understood = is_understood && !argument.starts_with("--");
      places.push_back(argument);
    }
  }
  if (!is_understood || places.empty() || places.size() > 2) {
    std::fprintf(
        stderr,
        "usage: meshrec-predict [--require-signature KEY] [--no-verify] [--copy-weights] FOLDER [FILE]\n");
    return 2;
  }
  try {
    const meshrec::Predictor predictor(places[0], options);
    std::ifstream file;
    if (places.size() == 2) {
      file.open(places[1]);
      if (!file) throw std::runtime_error(places[1] + " cannot be opened.");
    }
    const Requests requests = read(places.size() == 2 ? file : std::cin, predictor);
    std::vector<meshrec::Feature> features;
    for (std::size_t f = 0; f < requests.ids.size(); ++f) {
      features.push_back({requests.ids[f].data(), static_cast<std::int64_t>(requests.ids[f].size()),
                          requests.lengths[f].data()});
    }
    for (const float score : predictor.predict(requests.dense.data(), requests.batch, features)) {
      // Nine digits identify every float.
      std::printf("%.9g\n", static_cast<double>(score));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "meshrec-predict: %s\n", error.what());
    return 1;
  }
  return 0;
}

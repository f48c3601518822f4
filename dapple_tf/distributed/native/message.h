// The form in which one exchange's tensors travel from one rank to another.
//
// A message is a prefix (magic, kind, length of the header), a header (step, name of the exchange, dtype and shape of
// each tensor) and the tensors' bytes, one after the other. Between processes of a host, a message of kind kReferences
// has the address of each tensor in its header, and no bytes after it: the receiver copies them from the sender's
// memory, and the sender keeps the tensors until it gets kCopied. Numbers are in the byte order of the machine: all
// ranks have one.

#ifndef DAPPLE_TF_NATIVE_MESSAGE_H_
#define DAPPLE_TF_NATIVE_MESSAGE_H_

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace dapple {

constexpr char kMagic[3] = {'D', 'X', 'M'};
constexpr size_t kPrefixBytes = sizeof(kMagic) + sizeof(char) + sizeof(uint32_t);
constexpr uint32_t kMaxHeaderBytes = 1 << 20;

enum class Kind : char {
  kTensors = 'T',     // tensors, by value
  kReferences = 'R',  // tensors, by their addresses in the sender's memory
  kCopied = 'C',      // the oldest kReferences message without an answer is copied; no header
  kProbe = 'P',       // an address, and the number that is there
  kReadable = 'Y',    // the number of the probe has been found, so references may be sent; no header
};

struct Prefix {
  Kind kind;
  uint32_t header_bytes;
};

// What a message belongs to: the `step`-th execution, from 1, of the exchange of this name.
struct Tag {
  std::string exchange;
  int64_t step;

  std::string Describe() const { return exchange + " of step " + std::to_string(step); }
};

struct Message {
  Tag tag;
  std::vector<tensorflow::Tensor> tensors;

  int64_t Bytes() const {
    int64_t bytes = 0;
    for (const auto& tensor : tensors) bytes += tensor.TotalBytes();
    return bytes;
  }
};

template <typename Number>
void AppendNumber(std::string* text, Number number) {
  text->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// Returns the header of a message with its prefix in front.
inline std::string AddPrefix(Kind kind, const std::string& header) {
  std::string encoded(kMagic, sizeof(kMagic));
  AppendNumber(&encoded, kind);
  AppendNumber<uint32_t>(&encoded, header.size());
  return encoded + header;
}

// Returns prefix and header of a message whose tensors are sent by value, or by reference.
inline std::string EncodeHeader(Kind kind, const Message& message) {
  std::string header;
  AppendNumber<int64_t>(&header, message.tag.step);
  AppendNumber<uint32_t>(&header, message.tag.exchange.size());
  AppendNumber<uint32_t>(&header, message.tensors.size());
  header += message.tag.exchange;
  for (const auto& tensor : message.tensors) {
    AppendNumber<int32_t>(&header, tensor.dtype());
    AppendNumber<int32_t>(&header, tensor.dims());
    for (int i = 0; i < tensor.dims(); ++i) AppendNumber<int64_t>(&header, tensor.dim_size(i));
    if (kind == Kind::kReferences) AppendNumber(&header, reinterpret_cast<uint64_t>(tensor.tensor_data().data()));
  }
  return AddPrefix(kind, header);
}

// Returns nothing if these bytes are no prefix.
inline std::optional<Prefix> DecodePrefix(const char* bytes) {
  if (std::memcmp(bytes, kMagic, sizeof(kMagic)) != 0) return std::nullopt;
  Prefix prefix;
  std::memcpy(&prefix.kind, bytes + sizeof(kMagic), sizeof(prefix.kind));
  std::memcpy(&prefix.header_bytes, bytes + sizeof(kMagic) + sizeof(prefix.kind), sizeof(prefix.header_bytes));
  if (prefix.header_bytes > kMaxHeaderBytes) return std::nullopt;
  return prefix;
}

// Reads numbers and text from a header; `ok` turns false at the first read past its end.
class HeaderReader {
 public:
  explicit HeaderReader(const std::string& header) : header_(header) {}

  template <typename Number>
  Number ReadNumber() {
    Number number = 0;
    if (Take(sizeof(number))) std::memcpy(&number, header_.data() + place_ - sizeof(number), sizeof(number));
    return number;
  }

  std::string ReadText(size_t bytes) {
    return Take(bytes) ? header_.substr(place_ - bytes, bytes) : std::string();
  }

  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && place_ == header_.size(); }

 private:
  bool Take(size_t bytes) {
    ok_ = ok_ && bytes <= header_.size() - place_;
    if (ok_) place_ += bytes;
    return ok_;
  }

  const std::string& header_;
  size_t place_ = 0;
  bool ok_ = true;
};

// Reads a header into `message`, whose tensors it allocates, with undefined contents; and their `addresses`, where they
// were sent by reference. Returns false if it is damaged.
inline bool DecodeHeader(Kind kind, const std::string& header, tensorflow::Allocator* allocator, Message* message,
                         std::vector<uint64_t>* addresses) {
  HeaderReader reader(header);
  message->tag.step = reader.ReadNumber<int64_t>();
  const auto name_bytes = reader.ReadNumber<uint32_t>();
  const auto count = reader.ReadNumber<uint32_t>();
  message->tag.exchange = reader.ReadText(name_bytes);
  message->tensors.clear();
  addresses->clear();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    const auto dtype = static_cast<tensorflow::DataType>(reader.ReadNumber<int32_t>());
    const auto rank = reader.ReadNumber<int32_t>();
    if (rank < 0 || rank > tensorflow::TensorShape::MaxDimensions()) return false;
    std::vector<int64_t> dims;
    for (int32_t k = 0; k < rank; ++k) dims.push_back(reader.ReadNumber<int64_t>());
    if (kind == Kind::kReferences) addresses->push_back(reader.ReadNumber<uint64_t>());
    tensorflow::TensorShape shape;
    if (!reader.ok() || !tensorflow::DataTypeCanUseMemcpy(dtype)) return false;
    if (!tensorflow::TensorShape::BuildTensorShape(dims, &shape).ok()) return false;
    message->tensors.emplace_back(allocator, dtype, shape);
    if (!message->tensors.back().IsInitialized()) return false;  // no memory
  }
  return reader.at_end();
}

}  // namespace dapple

#endif  // DAPPLE_TF_NATIVE_MESSAGE_H_

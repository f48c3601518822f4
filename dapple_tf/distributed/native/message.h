// The form in which one exchange's tensors travel from one rank to another.
//
// A message is a prefix (magic, length of the header), a header (step, name of the exchange, dtype and shape of each
// tensor) and the tensors' bytes, one after the other. Numbers are in the byte order of the machine: all ranks have one.

#ifndef DAPPLE_TF_NATIVE_MESSAGE_H_
#define DAPPLE_TF_NATIVE_MESSAGE_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace dapple {

constexpr char kMagic[4] = {'D', 'X', 'M', '1'};
constexpr size_t kPrefixBytes = sizeof(kMagic) + sizeof(uint32_t);
constexpr uint32_t kMaxHeaderBytes = 1 << 20;

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

// Returns prefix and header of a message.
inline std::string EncodeHeader(const Message& message) {
  std::string header;
  AppendNumber<int64_t>(&header, message.tag.step);
  AppendNumber<uint32_t>(&header, message.tag.exchange.size());
  AppendNumber<uint32_t>(&header, message.tensors.size());
  header += message.tag.exchange;
  for (const auto& tensor : message.tensors) {
    AppendNumber<int32_t>(&header, tensor.dtype());
    AppendNumber<int32_t>(&header, tensor.dims());
    for (int i = 0; i < tensor.dims(); ++i) AppendNumber<int64_t>(&header, tensor.dim_size(i));
  }
  std::string encoded(kMagic, sizeof(kMagic));
  AppendNumber<uint32_t>(&encoded, header.size());
  return encoded + header;
}

// Returns the length of the header that follows a prefix, or 0 if these bytes are no prefix.
inline uint32_t DecodePrefix(const char* prefix) {
  if (std::memcmp(prefix, kMagic, sizeof(kMagic)) != 0) return 0;
  uint32_t bytes;
  std::memcpy(&bytes, prefix + sizeof(kMagic), sizeof(bytes));
  return bytes <= kMaxHeaderBytes ? bytes : 0;
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

// Reads a header into `message`, whose tensors it allocates, with undefined contents. Returns false if it is damaged.
inline bool DecodeHeader(const std::string& header, tensorflow::Allocator* allocator, Message* message) {
  HeaderReader reader(header);
  message->tag.step = reader.ReadNumber<int64_t>();
  const auto name_bytes = reader.ReadNumber<uint32_t>();
  const auto count = reader.ReadNumber<uint32_t>();
  message->tag.exchange = reader.ReadText(name_bytes);
  message->tensors.clear();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    const auto dtype = static_cast<tensorflow::DataType>(reader.ReadNumber<int32_t>());
    const auto rank = reader.ReadNumber<int32_t>();
    if (rank < 0 || rank > tensorflow::TensorShape::MaxDimensions()) return false;
    std::vector<int64_t> dims;
    for (int32_t k = 0; k < rank; ++k) dims.push_back(reader.ReadNumber<int64_t>());
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

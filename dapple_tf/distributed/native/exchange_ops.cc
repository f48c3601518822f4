// TensorFlow ops that send tensors to another rank and receive them from there, and functions that Python calls.
//
// Both are stateful: TensorFlow neither folds, merges nor repeats them. In the name `exchange` each `*` stands for one of
// the `numbers`, which a loop over micro-batches computes.

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "network.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace dapple {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::DataType;
using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

REGISTER_OP("DappleSend")
    .Input("values: T")
    .Input("numbers: N * int64")
    .Output("bytes: int64")
    .Attr("T: list(type) >= 1")
    .Attr("N: int >= 0")
    .Attr("peer: int")
    .Attr("exchange: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("Queues the values for the rank `peer`, and returns their bytes; their memory is kept until they are sent.");

REGISTER_OP("DappleReceive")
    .Input("numbers: N * int64")
    .Output("values: T")
    .Output("bytes: int64")
    .Attr("T: list(type) >= 1")
    .Attr("N: int >= 0")
    .Attr("shapes: list(shape)")
    .Attr("peer: int")
    .Attr("exchange: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      std::vector<PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("shapes", &shapes));
      if (static_cast<int>(shapes.size()) + 1 != context->num_outputs()) {
        return absl::InvalidArgumentError("give one shape for each type");
      }
      for (size_t i = 0; i < shapes.size(); ++i) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(context->MakeShapeFromPartialTensorShape(shapes[i], &shape));
        context->set_output(i, shape);
      }
      context->set_output(shapes.size(), context->Scalar());
      return absl::OkStatus();
    })
    .Doc("Returns the values of the next message of this exchange from the rank `peer`, and their bytes.");

absl::Status SetBytes(OpKernelContext* context, int output, int64_t bytes) {
  Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(output, TensorShape({}), &tensor));
  tensor->scalar<int64_t>()() = bytes;
  return absl::OkStatus();
}

// Returns the name of the exchange in this execution: `pattern` with the op's numbers in the places of its stars.
absl::Status NameExchange(OpKernelContext* context, const std::string& pattern, std::string* name) {
  OpInputList numbers;
  TF_RETURN_IF_ERROR(context->input_list("numbers", &numbers));
  int next = 0;
  for (const char letter : pattern) {
    if (letter != '*') {
      name->push_back(letter);
    } else if (next < numbers.size() && TensorShapeUtils::IsScalar(numbers[next].shape())) {
      absl::StrAppend(name, numbers[next++].scalar<int64_t>()());
    } else {
      return absl::InvalidArgumentError(absl::StrCat("there is no scalar for each * of ", pattern));
    }
  }
  return absl::OkStatus();
}

class SendOp : public AsyncOpKernel {
 public:
  explicit SendOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("peer", &peer_));
    OP_REQUIRES_OK(context, context->GetAttr("exchange", &exchange_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::string name;
    OP_REQUIRES_OK_ASYNC(context, NameExchange(context, exchange_, &name), done);
    OpInputList inputs;
    OP_REQUIRES_OK_ASYNC(context, context->input_list("values", &inputs), done);
    std::vector<Tensor> values;
    int64_t bytes = 0;
    for (const Tensor& value : inputs) {
      OP_REQUIRES_ASYNC(context, tensorflow::DataTypeCanUseMemcpy(value.dtype()),
                        absl::InvalidArgumentError(absl::StrCat("cannot send a tensor of dtype ",
                                                                tensorflow::DataTypeString(value.dtype()))),
                        done);
      values.push_back(value);
      bytes += value.TotalBytes();
    }
    OP_REQUIRES_OK_ASYNC(context, Network::Get()->Send(peer_, name, std::move(values)), done);
    OP_REQUIRES_OK_ASYNC(context, SetBytes(context, 0, bytes), done);
    done();
  }

 private:
  int peer_;
  std::string exchange_;
};

class ReceiveOp : public AsyncOpKernel {
 public:
  explicit ReceiveOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("peer", &peer_));
    OP_REQUIRES_OK(context, context->GetAttr("exchange", &exchange_));
    OP_REQUIRES_OK(context, context->GetAttr("T", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::string name;
    OP_REQUIRES_OK_ASYNC(context, NameExchange(context, exchange_, &name), done);
    const Tag tag = Network::Get()->NextTag(peer_, name);
    // A cancelled step is noted, and does not end the wait. If a stage function fails, TensorFlow cancels the step before
    // it notes the function's error, and would report the error of an op that ends first. See dapple_exchange_abort.
    auto cancellation = std::make_shared<Cancellation>();
    CancellationManager* manager = context->cancellation_manager();
    const CancellationToken token = manager->get_cancellation_token();
    if (!manager->RegisterCallback(token, [cancellation]() { cancellation->Note(); })) cancellation->Note();
    Network::Get()->mailbox()->Await(
        peer_, tag, cancellation,
        [this, context, tag, done, manager, token](const absl::Status& status, std::vector<Tensor> values) {
          manager->TryDeregisterCallback(token);
          OP_REQUIRES_OK_ASYNC(context, status, done);
          OP_REQUIRES_OK_ASYNC(context, SetOutputs(context, tag, values), done);
          done();
        });
  }

 private:
  absl::Status SetOutputs(OpKernelContext* context, const Tag& tag, const std::vector<Tensor>& values) {
    bool fits = values.size() == types_.size();
    int64_t bytes = 0;
    for (size_t i = 0; fits && i < values.size(); ++i) {
      fits = values[i].dtype() == types_[i] && shapes_[i].IsCompatibleWith(values[i].shape());
      bytes += values[i].TotalBytes();
      if (fits) context->set_output(i, values[i]);
    }
    if (!fits) {
      return absl::InternalError(absl::StrCat("rank ", peer_, " has sent other dtypes or shapes than expected in ",
                                              tag.Describe()));
    }
    return SetBytes(context, types_.size(), bytes);
  }

  int peer_;
  std::string exchange_;
  std::vector<DataType> types_;
  std::vector<PartialTensorShape> shapes_;
};

REGISTER_KERNEL_BUILDER(Name("DappleSend").Device(DEVICE_CPU), SendOp);
REGISTER_KERNEL_BUILDER(Name("DappleReceive").Device(DEVICE_CPU), ReceiveOp);

}  // namespace dapple

#define DAPPLE_EXPORT extern "C" __attribute__((visibility("default")))

// Takes over a connected socket; returns 0 if there is a connection to this rank already, else 1.
DAPPLE_EXPORT int dapple_exchange_connect(int peer, int fd) { return dapple::Network::Get()->Connect(peer, fd); }

// Returns the most bytes of messages that were in flight at one time since the last call.
DAPPLE_EXPORT int64_t dapple_exchange_take_peak() { return dapple::Network::Get()->in_flight()->TakePeak(); }

// Writes a line `rank exchange` for each message that an op has waited for longer than `seconds`, as far as they fit.
DAPPLE_EXPORT void dapple_exchange_describe_waits(double seconds, char* text, int64_t size) {
  const std::string lines = dapple::Network::Get()->mailbox()->DescribeWaits(seconds);
  text[lines.copy(text, size - 1)] = 0;
}

// Returns 1 if an op waits whose step was cancelled more than `seconds` ago: it has failed, and cannot end.
DAPPLE_EXPORT int dapple_exchange_has_cancelled_waits(double seconds) {
  return dapple::Network::Get()->mailbox()->HasCancelledWaits(seconds);
}

// Ends what ops wait for at this moment, in a step that has failed; the error is not reported as the cause.
DAPPLE_EXPORT void dapple_exchange_abort() {
  dapple::Network::Get()->mailbox()->Abort(
      tensorflow::StatusGroup::MakeDerived(absl::CancelledError("The step has failed elsewhere")));
}

// Closes the connections in a forked child.
DAPPLE_EXPORT void dapple_exchange_close_in_child() { dapple::Network::Get()->CloseInChild(); }

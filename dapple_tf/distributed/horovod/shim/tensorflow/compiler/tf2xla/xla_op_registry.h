// Stands in for a header of XLA that a CPU build of Horovod includes and does not use; see README.md.
#pragma once

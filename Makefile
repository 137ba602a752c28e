# make         builds ./train                  make demo     trains, samples, saves and resumes, in a few minutes
# make test    everything that must hold       make law      every layout is the same model (long)
# make bench   speed, beside PyTorch           make mutants  breaks the code on purpose; a test must notice (long)
# make deps    installs what is missing (root), or prints the line that does
# make loc     how much there is to read
#
# make kernels DEVICE=cpu|emu|cuda   the kernels alone, as a library (tests, dev/bench); emu: CUDA sources on a CPU, dev/emu
# make emu-kernel K=layernorm        what one CUDA kernel moves and does, counted without a GPU
#
# DEVICE=cpu|cuda|emu (else cuda where nvcc and a GPU are found)   PRECISION=fp32|bf16 (else bf16 on cuda)   MPI=1|0
# SANITIZE=address,undefined   CHECKED=0|1 (emu: watch every access)

NVCC      ?= nvcc
ifndef DEVICE
DEVICE    := $(if $(and $(shell command -v $(NVCC)),$(shell nvidia-smi -L 2>/dev/null)),cuda,cpu)
endif
PRECISION ?= $(if $(filter cuda,$(DEVICE)),bf16,fp32)
MPI       ?= 1
SANITIZE  ?=
CHECKED   ?= 0

ifeq ($(filter $(DEVICE),cpu emu cuda),)
$(error DEVICE=$(DEVICE) is none of cpu, emu, cuda)
endif
ifeq ($(filter $(PRECISION),fp32 bf16),)
$(error PRECISION=$(PRECISION) is neither fp32 nor bf16)
endif

BUILD := build/$(DEVICE)-$(PRECISION)$(if $(filter 0,$(MPI)),-nompi)$(if $(SANITIZE),-sanitized)$(if $(filter 1,$(CHECKED)),-checked)

packages := $(if $(filter cpu,$(DEVICE)),openblas) libcjson
CFLAGS := -I. -std=c11 -D_GNU_SOURCE -O3 -g -march=native -fno-math-errno -fno-trapping-math -fopenmp \
          -Wall -Wextra -Werror $(CFLAGS_MORE) -MMD -MP $(shell pkg-config --cflags $(packages) 2>/dev/null)
LIBS   := $(or $(shell pkg-config --libs $(packages) 2>/dev/null),$(if $(filter cpu,$(DEVICE)),-lopenblas) -lcjson) -lm
ifeq ($(PRECISION),bf16)
CFLAGS += -DPRECISION_BF16
endif
ifeq ($(MPI),1)
CFLAGS += -DUSE_MPI $(or $(shell pkg-config --cflags ompi-c 2>/dev/null),$(shell mpicc --showme:compile 2>/dev/null))
LIBS   += $(or $(shell pkg-config --libs ompi-c 2>/dev/null),$(shell mpicc --showme:link 2>/dev/null),-lmpi)
endif
ifneq ($(SANITIZE),)
CFLAGS += -Wno-pass-failed -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer
endif

# ---- the program -------------------------------------------------------------------------------------------------------
# Of the device: its half of the kernels, and of runtime/.
cuda_sources := $(wildcard kernels/*.cu)
cuda_kernels := $(patsubst %.cu,$(BUILD)/%.o,$(cuda_sources))
halves       := runtime/device_cpu.c runtime/comm_cpu.c runtime/device_cuda.c runtime/comm_cuda.c
runtime      := $(filter-out $(halves),$(wildcard runtime/*.c)) $(filter %_$(if $(filter cpu,$(DEVICE)),cpu,cuda).c,$(halves))
library      := $(runtime:%.c=$(BUILD)/%.o) $(if $(filter cpu,$(DEVICE)),$(patsubst %.c,$(BUILD)/%.o,$(wildcard kernels/*.c)),$(cuda_kernels))
ifeq ($(DEVICE),emu) # and what plays the GPU; NCCL, which MPI answers, in the program alone
emulator := $(patsubst %.cpp,$(BUILD)/%.o,$(filter-out dev/emu/nccl.cpp $(if $(filter 0,$(CHECKED)),dev/emu/check.cpp),\
            $(wildcard dev/emu/*.cpp)))
library  += $(emulator) $(if $(filter 1,$(MPI)),$(BUILD)/dev/emu/nccl.o)
endif
objects := $(BUILD)/train_gpt2.o $(BUILD)/config.o $(BUILD)/report.o $(BUILD)/report_explain.o $(BUILD)/state.o $(BUILD)/dp_zero.o $(BUILD)/tp_sp.o $(BUILD)/cp_ring.o $(BUILD)/pp_1f1b.o $(BUILD)/ep_moe.o $(BUILD)/fp8_linear.o $(library)
faulty  := comm_all_reduce comm_reduce_scatter comm_all_gather comm_send comm_receive matmul_backward_weight adamw_update connect send MPI_Abort
text    := build/repository.txt # what a bare ./train learns: this repository
prose   := $(sort $(wildcard *.md Makefile *.h *.c *.cu kernels/* runtime/*.[ch] tests/*.c tests/*.cu tests/*.py dev/*.md \
                             dev/*.html dev/*.py dev/*.sh dev/*/*.md dev/*/*.py dev/*/*.sh dev/*/*.cpp dev/emu/*.h))

all: train
train: $(BUILD)/train $(text) # ./train is the last built
	@ln -sf $< $@

$(BUILD)/train: $(objects)
	@echo "  link $@"
	@$(CC) $(CFLAGS) $(filter %.o,$^) -o $@ $(LIBS)

$(BUILD)/train_gpt2.o: train_gpt2.cu
	@echo "  cc   $<"
	@$(CC) $(CFLAGS) -x c -c $< -o $@

$(BUILD)/config.o: config.c
	@echo "  cc   $<"
	@$(CC) $(CFLAGS) -DREPOSITORY_TEXT='"$(CURDIR)/$(strip $(text))"' -c $< -o $@

$(BUILD)/%.o: %.c
	@echo "  cc   $<"
	@$(CC) $(CFLAGS) -c $< -o $@

$(BUILD)/tests/train_with_faults: tests/faults.c $(objects) # the program, with what may go wrong between its files
	@echo "  link $@"
	@$(CC) $(CFLAGS) $(filter-out %.h,$^) -o $@ $(foreach f,$(faulty),-Wl,--wrap=$(f)) $(LIBS)

$(BUILD)/tests/test_report: $(BUILD)/report.o $(BUILD)/report_explain.o $(BUILD)/tp_sp.o $(BUILD)/pp_1f1b.o
$(BUILD)/tests/test_schedule: $(BUILD)/pp_1f1b.o
$(BUILD)/tests/test_ring: $(BUILD)/cp_ring.o tests/on_all_ranks.h
$(BUILD)/tests/test_comm: tests/on_all_ranks.h
$(BUILD)/tests/%: tests/%.c $(library) # C unit tests, with cmocka
	@echo "  link $@"
	@$(CC) $(CFLAGS) $(filter-out %.h,$^) -o $@ -lcmocka $(LIBS)

$(text): $(prose)
	@mkdir -p build
	@cat $^ > $@

# ---- the kernels alone, as a library ---------------------------------------------------------------------------------
kernels: $(BUILD)/libkernels.so

ifeq ($(DEVICE),cpu)
$(BUILD)/libkernels.so: $(wildcard kernels/*.[ch])
	@echo "  link $@"
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) -MF $(BUILD)/libkernels.d -fPIC -shared $(filter %.c,$^) -o $@ $(filter-out -lcjson,$(LIBS))
endif

ifeq ($(DEVICE),emu)
# A launch `kernel<T><<<grid, block>>>(…)` becomes C++, line by line, with the kernel's name, even where that is on the line
# before; what kernels say in __launch_bounds__ stands at the end; the rest is dev/emu's headers. (DWARF 4: addr2line, which check.cpp asks, mistakes the files of DWARF 5.)
EMUFLAGS := -I. -std=gnu++17 -DEMU -fPIC -fno-semantic-interposition -gdwarf-4 -march=native -Wall -Wextra -Werror \
            -Wno-unknown-pragmas -MMD -MP \
            $(if $(filter bf16,$(PRECISION)),-DPRECISION_BF16) $(if $(filter 1,$(CHECKED)),-DEMU_CHECKED)
# Every access of a kernel stays one call of check.cpp: no vectors of scalars, no loop that becomes memcpy.
WATCHED  := $(if $(filter 1,$(CHECKED)),-O1 -fno-tree-sra -fno-tree-vectorize -fno-store-merging \
            -fno-tree-loop-distribute-patterns -fsanitize=thread,-O2 -ftrivial-auto-var-init=pattern)
LIBS     += -lboost_context -lstdc++
$(BUILD)/runtime/%_cuda.o: CFLAGS += -Idev/emu/include

$(BUILD)/libkernels.so: $(cuda_kernels) $(emulator)
	@echo "  link $@"
	@$(CXX) -shared $^ -o $@ -lboost_context

$(BUILD)/%.cpp: %.cu
	@mkdir -p $(@D)
	@sed -e '1i #line 1 "$<"' -e '/^ *<<</{G; s/<<<\(.*\)\n *\(\w\+\).*/->*emu::Launch("\2", \1/}; h' \
	     -e 's/\(\w\+\)\(<.*>\)\?<<</\1\2->*emu::Launch("\1", /; s/>>>(/)(/; s/extern __shared__/extern/' $< > $@
	@tr '\n' ' ' < $< | grep -oE '__launch_bounds__\([^()]+\) +\w+\(' | \
	 sed 's/__launch_bounds__(\(.*\)) *\(\w*\)(/static const emu::Bounds bounds_of_\2("\2", \1);/' >> $@

$(cuda_kernels): $(BUILD)/%.o: $(BUILD)/%.cpp # not from the .c
	@echo "  emu  $*.cu"
	@$(CXX) $(EMUFLAGS) -Idev/emu/include $(WATCHED) -c $< -o $@

$(BUILD)/dev/emu/%.o: dev/emu/%.cpp
	@echo "  c++  $<"
	@mkdir -p $(@D)
	@$(CXX) $(EMUFLAGS) -Idev/emu/include -O2 -c $< -o $@
$(BUILD)/dev/emu/nccl.o: EMUFLAGS += -DOMPI_SKIP_MPICXX $(filter -I%,$(CFLAGS))
endif

ifeq ($(DEVICE),cuda)
# The card that is here, or all that the release is for: sm_80, sm_89, sm_90a, and PTX that newer cards compile.
, := ,
ifndef CUDA_ARCH
CUDA_ARCH := $(if $(shell nvidia-smi -L 2>/dev/null),-arch=native,$(foreach a,80 89 90a,-gencode=arch=compute_$a$(,)code=sm_$a) \
             $(foreach a,80 89,-gencode=arch=compute_$a$(,)code=compute_$a))
endif
# The toolkit's libraries are found again when the program runs, wherever it is installed.
CUDA_LIB  := $(abspath $(dir $(realpath $(shell command -v $(NVCC))))../lib64)
NVCCFLAGS := -I. -std=c++17 -O3 -lineinfo -Werror all-warnings -Xptxas -warn-spills,-warn-lmem-usage -Xcompiler -fPIC,-Wall,-Wextra,-Werror \
             $(if $(filter bf16,$(PRECISION)),-DPRECISION_BF16)
LIBS      += -L$(CUDA_LIB) -lcudart -lcublasLt $(if $(filter 1,$(MPI)),-lnccl) -lstdc++ -Wl,-rpath=$(CUDA_LIB)
$(BUILD)/runtime/%_cuda.o: CFLAGS += -isystem $(CUDA_LIB)/../include

$(BUILD)/libkernels.so: $(cuda_kernels)
	@echo "  link $@"
	@$(NVCC) $(CUDA_ARCH) -cudart shared -shared $^ -o $@ -lcublasLt -Xlinker -rpath=$(CUDA_LIB)

$(cuda_kernels): $(BUILD)/%.o: %.cu $(wildcard kernels/*.cuh kernels/*.h)
	@echo "  nvcc $<"
	@mkdir -p $(@D)
	@$(NVCC) $(NVCCFLAGS) $(CUDA_ARCH) -c $< -o $@
endif

# What this build finds on this machine, tried once a build directory.
$(objects): | $(BUILD)/probed
$(BUILD)/probed:
	@mkdir -p $(BUILD)/kernels $(BUILD)/runtime $(BUILD)/tests
	@dev/probe.sh "$(CC) $(CFLAGS)" "$(LIBS)" $(MPI) $(DEVICE) $(CUDA_LIB)/../include
	@touch $@

# What the kernels of one operation move and do, counted without a GPU.
emu-kernel:
	dev/deps.sh emu
	@PRECISION=$(if $(filter command line,$(origin PRECISION)),$(PRECISION),bf16) \
	 $(firstword $(wildcard build/venv/bin/python /usr/bin/python3) python3) dev/emu/kernel_report.py $(K)

# ---- what to do with it ------------------------------------------------------------------------------------------------
deps:
	dev/deps.sh build

demo: deps
	$(MAKE)
	dev/demo.sh

# Two files of tests at a time: most tests wait for processes to start, to sleep or to die.
PYTEST = build/venv/bin/python -m pytest -q tests -n 2 --dist loadfile
ready:
	dev/deps.sh test
	$(MAKE)
test: ready
	$(PYTEST) -m "not law and not mutants"
law: ready
	$(PYTEST) -m law
mutants: ready
	$(PYTEST) -m mutants
bench: ready
	$(MAKE) DEVICE=cpu PRECISION=bf16
	$(MAKE) DEVICE=cpu PRECISION=fp32
	build/venv/bin/python dev/bench/bench.py

reading := README.md train.h kernels/kernels.h train_gpt2.cu dp_zero.c tp_sp.c cp_ring.c pp_1f1b.c ep_moe.c fp8_linear.c $(wildcard kernels/*.c) runtime/device.h \
           runtime/comm.h runtime/comm.c
loc:
	@echo "to read, in this order:"; wc -l $(reading)
	@echo "then, in CUDA:"; wc -l runtime/comm_cuda.c kernels/cuda.cuh kernels/ptx.cuh $(filter-out kernels/cuda.cuh kernels/ptx.cuh,$(wildcard kernels/*.cu*)) kernels/ladder.h
	@echo "plumbing:"; wc -l config.[ch] report.[ch] state.[ch] $(filter-out $(reading) kernels/ladder.h runtime/comm_cuda.c,$(wildcard kernels/*.h runtime/*.[ch]))
	@echo "tools and tests:"; wc -l dev/*.* dev/*/*.* tests/* | tail -n 1

clean:
	rm -rf build/cpu-* build/emu-* build/cuda-* train

-include $(shell find build -name '*.d' 2>/dev/null)
.PHONY: all train kernels emu-kernel deps demo ready test law mutants bench loc clean

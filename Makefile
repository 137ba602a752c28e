# make         builds ./train                  make demo     trains, samples, saves and resumes, in a few minutes
# make test    everything that must hold       make law      every layout is the same model (long)
# make bench   speed, beside PyTorch           make mutants  breaks the code on purpose; a test must notice (long)
# make deps    installs what is missing (root), or prints the line that does
# make loc     how much there is to read
#
# DEVICE=cpu   PRECISION=fp32|bf16   MPI=1|0   SANITIZE=address,undefined

DEVICE    ?= cpu
PRECISION ?= fp32
MPI       ?= 1
SANITIZE  ?=

ifneq ($(DEVICE),cpu)
$(error DEVICE=$(DEVICE) is not here yet; nearest: cpu)
endif
ifeq ($(filter $(PRECISION),fp32 bf16),)
$(error PRECISION=$(PRECISION) is neither fp32 nor bf16)
endif

BUILD := build/$(DEVICE)-$(PRECISION)$(if $(filter 0,$(MPI)),-nompi)$(if $(SANITIZE),-sanitized)

CFLAGS := -I. -std=c11 -D_GNU_SOURCE -O3 -g -march=native -fno-math-errno -fno-trapping-math -fopenmp \
          -Wall -Wextra -Werror $(CFLAGS_MORE) -MMD -MP $(shell pkg-config --cflags openblas libcjson 2>/dev/null)
LIBS   := $(or $(shell pkg-config --libs openblas libcjson 2>/dev/null),-lopenblas -lcjson) -lm
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
library := $(patsubst %.c,$(BUILD)/%.o,$(wildcard kernels/*.c runtime/*.c))
objects := $(BUILD)/train_gpt2.o $(BUILD)/report.o $(BUILD)/state.o $(BUILD)/dp_zero.o $(library)
faulty  := comm_all_reduce comm_reduce_scatter comm_all_gather matmul_backward_weight adamw_update connect send MPI_Abort
text    := build/repository.txt # what a bare ./train learns: this repository
prose   := $(sort $(wildcard *.md Makefile *.h *.c *.cu kernels/*.[ch] runtime/*.[ch] tests/*.c tests/*.py \
                             dev/*.md dev/*.html dev/*.py dev/*.sh dev/*/*.md dev/*/*.py dev/*/*.sh))

all: train
train: $(BUILD)/train $(text) # ./train is the last built
	@ln -sf $< $@

$(BUILD)/train: $(objects)
	@echo "  link $@"
	@$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

$(BUILD)/train_gpt2.o: train_gpt2.cu
	@echo "  cc   $<"
	@$(CC) $(CFLAGS) -DREPOSITORY_TEXT='"$(CURDIR)/$(strip $(text))"' -x c -c $< -o $@

$(BUILD)/%.o: %.c
	@echo "  cc   $<"
	@$(CC) $(CFLAGS) -c $< -o $@

$(BUILD)/tests/train_with_faults: tests/faults.c $(objects) # the program, with what may go wrong between its files
	@echo "  link $@"
	@$(CC) $(CFLAGS) $^ -o $@ $(foreach f,$(faulty),-Wl,--wrap=$(f)) $(LIBS)

$(BUILD)/tests/test_report: $(BUILD)/report.o
$(BUILD)/tests/%: tests/%.c $(library) # C unit tests, with cmocka
	@echo "  link $@"
	@$(CC) $(CFLAGS) $^ -o $@ -lcmocka $(LIBS)

$(text): $(prose)
	@mkdir -p build
	@cat $^ > $@

# What this build finds on this machine, tried once a build directory.
$(objects): | $(BUILD)/probed
$(BUILD)/probed:
	@mkdir -p $(BUILD)/kernels $(BUILD)/runtime $(BUILD)/tests
	@dev/probe.sh "$(CC) $(CFLAGS)" "$(LIBS)" $(MPI)
	@touch $@

# ---- what to do with it ------------------------------------------------------------------------------------------------
deps:
	dev/deps.sh build

demo: deps
	$(MAKE)
	dev/demo.sh

PYTEST = build/venv/bin/python -m pytest -q tests
test:
	dev/deps.sh test
	$(MAKE)
	$(PYTEST) -m "not law and not mutants"
law: train
	$(PYTEST) -m law
mutants: train
	$(PYTEST) -m mutants
bench: train
	$(MAKE) PRECISION=bf16 train
	$(MAKE) PRECISION=fp32 train
	build/venv/bin/python dev/bench/bench.py

reading := README.md train.h kernels/kernels.h train_gpt2.cu dp_zero.c $(wildcard kernels/*.c) runtime/comm.c
loc:
	@echo "to read, in this order:"; wc -l $(reading)
	@echo "plumbing:"; wc -l report.[ch] state.[ch] $(filter-out $(reading),$(wildcard kernels/*.h runtime/*.[ch]))
	@echo "tools and tests:"; wc -l dev/*.* dev/*/*.* tests/* | tail -n 1

clean:
	rm -rf build/cpu-* train

-include $(shell find build -name '*.d' 2>/dev/null)
.PHONY: all train deps demo test law mutants bench loc clean

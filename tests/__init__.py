from overcoat.train.products import compute_in_fp32

compute_in_fp32()  # in every process that runs tests

from tests import products as products  # in every process that runs tests

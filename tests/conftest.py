pytest_plugins = ["tests.support.time_table"]

"""Ways from a front end to engine cores: in this process or in processes of their own."""

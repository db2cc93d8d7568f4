-- Nanoseconds that are still to be computed, by pool. Each active request stores its own share, packed; LEFT has the
-- sums of all shares. A share or a sum that cannot be read has all of it summed anew: it adds nothing until its next
-- change.
local LEFT = P .. ':left'

-- A stored share, by pool; nothing where it cannot be read.
local function unpacked(share)
  local found = share and sound(cmsgpack.unpack, share)
  return type(found) == 'table' and found or nil
end

local function add(share)
  for pool, nanoseconds in pairs(share) do
    if call('HINCRBY', LEFT, pool, string.format('%.0f', nanoseconds)) == 0 then call('HDEL', LEFT, pool) end
  end
  return true
end

-- Takes one share for another; answers whether that could be done.
local function exchange(was, is)
  local more = {}
  for pool, nanoseconds in pairs(was) do more[pool] = -nanoseconds end
  for pool, nanoseconds in pairs(is) do more[pool] = (more[pool] or 0) + nanoseconds end
  for pool, nanoseconds in pairs(more) do
    if nanoseconds == 0 then more[pool] = nil end
  end
  return add(more)
end

-- The sum of a pool; nothing where it is none.
local function left_in(pool)
  local left = sound(call, 'HGET', LEFT, pool)
  if left == false then return '0' end
  return left and string.find(left, '^%d+$') and left
end

-- Sums the shares of all active requests anew.
local function recount()
  call('DEL', LEFT)
  for _, id in ipairs(call('ZRANGE', ACTIVE, 0, -1)) do
    local share = unpacked(sound(call, 'HGET', request_key(id), 'left'))
    if share then sound(add, share) end
  end
end

-- How many are active; of each pool the tasks that wait, when the first of them came, and what is left.
function verbs.stats()
  local lines = {}
  for _, pool in ipairs(A.pools) do
    if not left_in(pool) then
      recount()
      break
    end
  end
  for i, pool in ipairs(A.pools) do
    sound(ripen, pool)
    local oldest = 0
    for _, member in ipairs(sound(call, 'ZRANGE', ready_key(pool), 0, A.front - 1) or {}) do
      local pushed = tonumber(sound(call, 'HGET', task_of(member), 'pushed')) or wall
      oldest = math.max(oldest, wall - pushed)
    end
    lines[i] = {sound(size, pool) or 0, exact(oldest), left_in(pool)}
  end
  return {call('ZCARD', ACTIVE), lines}
end
